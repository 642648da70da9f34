"""Cases of the grouped matrix product, and their expected results in float64 numpy.

Any implementation of the contract is run through them. What has no defined result is NaN: padding,
and blocks without rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from jaxserve.pallas_kernels.grouped_matmul.api import Demand, GroupedMatmul, Groups, Options

BF16 = ml_dtypes.bfloat16


@dataclass(frozen=True)
class Shape:
    """Sizes of a case.

    rows: of every expert. spare: blocks without rows, behind those that hold some. numbers: the
    dtype of a weight that has scales, scales: of a column.
    """

    rows: tuple[int, ...]
    contracted: int
    columns: int
    parts: int = 1
    block: int = 16
    spare: int = 1
    dtype: type = np.float32
    out_dtype: type = np.float32
    numbers: type | None = None
    scales: int = 0

    def __str__(self) -> str:
        rows = ",".join(map(str, self.rows))
        kept = f"-{np.dtype(self.numbers)}-{self.scales}" if self.numbers else ""
        sizes = f"{rows}x{self.parts}x{self.contracted}x{self.columns}"
        return f"{sizes}-b{self.block}-{np.dtype(self.dtype)}{kept}"

    @property
    def experts(self) -> int:
        return len(self.rows)

    @property
    def owners(self) -> list[int]:
        """Return the expert of every live block."""
        return [
            expert for expert, rows in enumerate(self.rows) for _ in range(-(-rows // self.block))
        ]

    @property
    def options(self) -> Options:
        return Options(self.block, jnp.dtype(self.out_dtype), jax.devices()[0].device_kind)

    @property
    def demand(self) -> Demand:
        num_rows = (len(self.owners) + self.spare) * self.block
        sizes = num_rows, self.experts, self.parts, self.contracted, self.columns
        kept = (jnp.dtype(self.numbers), self.scales) if self.numbers else ()
        return Demand(*sizes, jnp.dtype(self.dtype), self.options.device_kind, *kept)


SHAPES = [
    Shape((16,), 64, 32),
    Shape((5,), 64, 32, spare=0),
    Shape((0, 3, 0, 0, 40, 1, 0, 16), 96, 80, parts=2),
    Shape((0, 0, 0, 0), 32, 32),
    Shape((0, 0, 70, 0), 128, 48, parts=2),
    Shape((1,) * 16, 40, 200, block=8),
    Shape((17, 16, 15), 200, 136, parts=2, spare=4),
]
SHAPES += [replace(shape, dtype=BF16, out_dtype=BF16) for shape in SHAPES[2:5]] + [
    replace(SHAPES[2], dtype=BF16),
]
LARGEST = {
    np.int8: 127,
    ml_dtypes.float8_e4m3fn: 448,
    ml_dtypes.int4: 7,
}  # numbers, of weights in 8 or 4 bits
QUANTIZED = [
    replace(shape, numbers=numbers)
    for numbers in LARGEST
    for shape in (
        Shape((0, 3, 0, 40, 16), 96, 80, parts=2, scales=1),
        Shape((0, 3, 0, 40, 16), 128, 256, parts=2, dtype=BF16, scales=1),
    )
]
QUANTIZED += [
    Shape((0, 0, 70, 0), 64, 48, parts=2, numbers=ml_dtypes.int4, scales=2),
    Shape((17, 16, 15), 192, 136, spare=4, numbers=ml_dtypes.int4, scales=3),
    Shape(
        (5, 0, 20), 256, 128, parts=2, dtype=BF16, out_dtype=BF16, numbers=ml_dtypes.int4, scales=8
    ),
    Shape((9, 20), 384, 128, dtype=BF16, numbers=ml_dtypes.int4, scales=3),
]


@cache
def compiled(kernel: GroupedMatmul, options: Options) -> Any:
    return jax.jit(
        lambda x, weight, groups, scales: kernel.multiply(x, weight, groups, options, scales)
    )


class Operands(NamedTuple):
    x: np.ndarray
    weight: np.ndarray
    groups: Groups
    scales: np.ndarray | None


def operands(shape: Shape, seed: int = 0) -> Operands:
    """Return random operands, with NaN in what must not be read.

    That is padding, blocks without rows, and weights of experts without rows. Weights are around 1,
    and so are the products of numbers and scales, which differ by as much.
    """
    rng = np.random.default_rng(seed)
    x = np.full((shape.demand.rows, shape.contracted), np.nan, shape.dtype)
    sizes = (shape.experts, shape.parts, shape.contracted, shape.columns)
    scales = None
    weight = rng.normal(size=sizes).astype(shape.dtype)
    if shape.numbers:
        largest = LARGEST[shape.numbers]
        weight = rng.uniform(-largest, largest, sizes).astype(shape.numbers)
        scales = (rng.uniform(0.5, 2, (*sizes[:2], shape.scales, sizes[3])) / largest).astype(
            np.float32
        )
    for expert, rows in enumerate(shape.rows):
        x[_begin(shape, expert) :][:rows] = rng.normal(size=(rows, shape.contracted))
        if not rows:
            (weight if scales is None else scales)[expert] = np.nan
    any_experts = rng.integers(0, shape.experts, shape.spare)
    experts = np.concatenate([shape.owners, any_experts]).astype(np.int32)
    return Operands(x, weight, Groups(experts, np.int32(len(shape.owners))), scales)


def dequantized_weight(shape: Shape, given: Operands) -> np.ndarray:
    """Return the weight in float64, [E, C, K, N]; with scales in groups, rounded as x is."""
    weight = given.weight.astype(np.float64)
    if given.scales is None:
        return weight
    apart = weight.reshape(*weight.shape[:2], shape.scales, -1, shape.columns)
    whole = (apart * given.scales[:, :, :, None].astype(np.float64)).reshape(weight.shape)
    return (
        whole.astype(np.float32).astype(shape.dtype).astype(np.float64)
        if shape.scales > 1
        else whole
    )


def _begin(shape: Shape, expert: int) -> int:
    """Return the first row of an expert."""
    return sum(-(-rows // shape.block) for rows in shape.rows[:expert]) * shape.block


def check(kernel: GroupedMatmul, shape: Shape, seed: int = 0) -> None:
    """Check that the kernel takes the shape and that every expert's rows are right, beside NaN."""
    kernel.check(shape.options, shape.demand)
    given = operands(shape, seed)
    x = given.x
    weight = dequantized_weight(shape, given)
    found = compiled(kernel, shape.options)(*given)
    # Interpreters run kernels in threads that XLA:CPU may starve for what is dispatched meanwhile.
    jax.block_until_ready(found)
    assert found.shape == (len(x), shape.parts, shape.columns) and found.dtype == shape.out_dtype
    for expert, rows in enumerate(shape.rows):
        at = slice(_begin(shape, expert), _begin(shape, expert) + rows)
        expected = np.einsum("MK,CKN->MCN", x[at].astype(np.float64), weight[expert])
        ours = np.asarray(found[at], np.float64)
        np.testing.assert_allclose(ours, expected, **tolerance(shape))


def tolerance(shape: Shape) -> dict[str, float]:
    """Return the tolerated error of float32 sums of K products around 1.

    A bfloat16 result adds its own rounding.
    """
    return {"atol": 4 * 2**-23 * shape.contracted, "rtol": 2**-8 if shape.out_dtype is BF16 else 0}


Kept = tuple[
    type | None, int
]  # a weight's numbers, if they have scales, and how many share one; 0: a column
ALL_KEPT: tuple[Kept, ...] = ((None, 0), *product(LARGEST, (0, 32)))


@st.composite
def shapes(
    draw: st.DrawFn, dtype: type, blocks: Sequence[int], kept: Sequence[Kept] = ALL_KEPT
) -> Shape:
    """Draw experts with no, few and many rows, and sizes that are and are no multiples of tiles."""
    block = draw(st.sampled_from(blocks))
    most = st.sampled_from([0, 0, 1, block - 1, block, block + 1, 3 * block])
    rows = draw(st.lists(most, min_size=1, max_size=6))
    contracted, columns = (draw(st.sampled_from([64, 128, 192, 256, 320, 384])) for _ in range(2))
    parts = draw(st.integers(1, 2))
    spare = draw(st.integers(0, 2))
    numbers, group = draw(st.sampled_from(kept))
    scales = contracted // (group or contracted) if numbers else 0
    spare = spare or int(not any(rows))
    return Shape(
        tuple(rows), contracted, columns, parts, block, spare, dtype, dtype, numbers, scales
    )
