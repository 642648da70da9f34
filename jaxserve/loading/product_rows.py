"""Measurement of up to how many rows a CPU's kernel is faster than XLA, with a model's own shapes.

Done once for a model's shapes on a processor, and kept in the folder of the compilation cache.
"""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.cache_folders import compiler_flags
from jaxserve.compilation_cache import keep_record, keeps_records, read_record
from jaxserve.cpu_kernels.processor import processor
from jaxserve.cpu_kernels.products import CpuProduct, multiply
from jaxserve.loading.load_plan import LoadPlan
from jaxserve.models.matmul import contract
from jaxserve.models.summed_last import SummedLast

ROWS: Final = (8, 16, 32, 64, 96, 128)
LEAST_BYTES: Final = 2**20  # of a weight: smaller ones stay in a cache, and take little time
ALL_BYTES: Final = 32 * 2**20  # of the weights of a pass: more than a core's caches
PASSES: Final = 7
SPREAD: Final = 0.2  # of the middle half of the passes, over their median
SECONDS: Final = 3.0

log = logging.getLogger("jaxserve.engine")


class Shape(NamedTuple):
    """The largest weight of a model's layers that the kernel multiplies."""

    numbers: str
    columns: int
    summed: int

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self.columns * self.summed * jnp.dtype(self.numbers).itemsize


class DisturbedError(Exception):
    """A measurement whose passes differ too much for too long."""


def measured(plan: LoadPlan, product: CpuProduct) -> CpuProduct:
    """Return the product with the rows that suit the processor and the plan's largest weight.

    The product as it is where that weight is small, where what is measured cannot be kept beside
    compiled steps, and where something disturbs the measurement, which the log says.
    """
    shape = largest_weight(plan)
    if shape is None or shape.nbytes < LEAST_BYTES or not keeps_records():
        return product
    key = key_of(shape, product.instructions)
    if kept_rows(key) is None:
        try:
            with jax.default_device(plan.mesh.devices.flat[0]):
                found = most_rows(Race(shape, product.instructions))
        except DisturbedError as error:
            log.info("products: the rows of the kernel were not measured: %s", str(error))
            return product
        keep_record(key, str(found))
    # Another process may have kept another number, and where none could be kept, another start
    # would find another.
    rows = kept_rows(key)
    if rows is None:
        return product
    max_rows = product.max_rows._replace(**{shape.numbers: rows})
    return replace(product, max_rows=max_rows, is_measured=True)


def largest_weight(plan: LoadPlan) -> Shape | None:
    """Return the largest weight of the layers that the kernel multiplies; None if it has none."""
    shapes = [
        Shape(
            parameter.values.dtype.name,
            math.prod(parameter.values.shape[: -parameter.declared.summed]),
            math.prod(parameter.values.shape[-parameter.declared.summed :]),
        )
        for parameter in plan.parameters
        if isinstance(parameter.declared, SummedLast) and parameter.path[0] == "layers"
    ]
    return max(shapes, key=lambda shape: shape.nbytes, default=None)


def key_of(shape: Shape, instructions: str) -> str:
    """Return the key of the record of a measurement, from what it is known to depend on."""
    here = processor()
    flags = f"{sorted(here.flags)}, XLA_FLAGS {compiler_flags()}"
    versions = f"jaxlib {version('jaxlib')}, jaxserve {version('jaxserve')}"
    weight = f"{shape.numbers} {shape.columns} x {shape.summed}"
    text = f"{here.name}, {flags}, {here.cores} cores, {versions}, {instructions}, {weight}"
    return f"product-rows-{sha256(text.encode()).hexdigest()}"


def kept_rows(key: str) -> int | None:
    """Return the rows that were measured before; None without a record of one of those."""
    text = read_record(key)
    return next((rows for rows in (1, *ROWS) if str(rows) == text), None)


def most_rows(is_faster: Callable[[int], bool]) -> int:
    """Return the most of ROWS up to which the kernel is faster; 1 if it is at none of them.

    The kernel is taken to be faster at fewer rows than any at which it was seen to be.

    Args:
        is_faster: Function that says if the kernel is at this number of rows.
    """
    low = 0  # of ROWS before this one the kernel is faster
    high = len(ROWS)
    while low < high:
        middle = (low + high) // 2
        if is_faster(ROWS[middle]):
            low = middle + 1
        else:
            high = middle
    return ROWS[low - 1] if low else 1


class Race:
    """The kernel and XLA in turns, with weights of one shape.

    Args:
        clock: Function that returns seconds.
    """

    def __init__(
        self, shape: Shape, instructions: str, clock: Callable[[], float] = time.perf_counter
    ):
        self._shape = shape
        self._clock = clock
        self._end = clock() + SECONDS
        dtype = jnp.dtype(shape.numbers)
        # Some of its columns take as long, each, as all of them.
        columns = min(shape.columns, -(-ALL_BYTES // (shape.summed * dtype.itemsize)))
        count = -(-ALL_BYTES // (columns * shape.summed * dtype.itemsize))
        self._weights = [jnp.ones((columns, shape.summed), dtype) for _ in range(count)]
        self._forms = (
            lambda x, weight: multiply(x, weight, instructions),
            lambda x, weight: contract("TK,MK->TM", x, weight),
        )

    def __call__(self, rows: int) -> bool:
        """Return whether the kernel is faster.

        DisturbedError where no PASSES that follow each other are steady before the time is over.
        """
        x = jnp.ones((rows, self._shape.summed), jnp.dtype(self._shape.numbers))
        products = [jax.jit(form).lower(x, self._weights[0]).compile() for form in self._forms]
        for product in products:
            self._pass(product, x)  # the first one has more to do
        newest: deque[tuple[float, ...]] = deque(maxlen=PASSES)
        while self._clock() < self._end:
            newest.append(tuple(self._pass(product, x) for product in products))
            kernel, by_xla = zip(*newest, strict=True)
            if len(newest) == PASSES and is_steady(kernel) and is_steady(by_xla):
                return statistics.median(kernel) < statistics.median(by_xla)
        raise DisturbedError(f"they were not steady for {SECONDS:g} s")

    def _pass(self, product: jax.stages.Compiled, x: jax.Array) -> float:
        began = self._clock()
        for weight in self._weights:
            jax.block_until_ready(product(x, weight))
        return self._clock() - began


def is_steady(seconds: Sequence[float]) -> bool:
    """Return whether the middle half of the passes is spread over SPREAD of the median at most."""
    low, middle, high = statistics.quantiles(seconds)
    return high - low <= SPREAD * middle
