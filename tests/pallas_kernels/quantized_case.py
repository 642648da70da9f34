"""Cases of the quantized matrix product, and their expected results in float64 numpy."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from jaxserve.pallas_kernels.quantized_matmul.api import GROUPS, Demand, Options, QuantizedMatmul

BF16 = ml_dtypes.bfloat16


@dataclass(frozen=True)
class Shape:
    rows: int
    contracted: int
    columns: tuple[int, ...]
    group: int
    dtype: type = BF16

    def __str__(self) -> str:
        columns = ",".join(map(str, self.columns))
        return f"{self.rows}x{self.contracted}x{columns}-g{self.group}-{np.dtype(self.dtype)}"

    @property
    def options(self) -> Options:
        return Options(jax.devices()[0].device_kind)

    @property
    def demand(self) -> Demand:
        return Demand(self.contracted, self.columns, self.group, jnp.dtype(self.dtype))


@cache
def compiled(kernel: QuantizedMatmul, options: Options) -> Any:
    return jax.jit(lambda x, numbers, scales: kernel.multiply(x, numbers, scales, options))


def check(kernel: QuantizedMatmul, shape: Shape, tolerance: float, seed: int = 0) -> None:
    """Check that the kernel takes the shape and is right to `tolerance` of its products' sizes.

    Scales differ by a factor of ten, and in sign, so that no column or group can be taken for
    another. All int4 numbers occur, among them -8, which rounding never makes.
    """
    kernel.check(shape.options, shape.demand)
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(shape.rows, shape.contracted)).astype(shape.dtype)
    numbers = rng.integers(-8, 8, (shape.contracted, *shape.columns))
    groups = (shape.contracted // shape.group, *shape.columns)
    scales = (10 ** rng.uniform(-1, 0, groups) * rng.choice([-1, 1], groups)).astype(np.float32)
    found = compiled(kernel, shape.options)(x, numbers.astype(ml_dtypes.int4), scales)
    # Interpreters run kernels in threads that XLA:CPU may starve for what is dispatched meanwhile.
    jax.block_until_ready(found)
    assert found.shape == (shape.rows, *shape.columns) and found.dtype == np.float32
    weight = numbers * np.repeat(scales.astype(np.float64), shape.group, axis=0)
    wide = x.astype(np.float64)
    error = np.abs(np.asarray(found, np.float64) - np.tensordot(wide, weight, 1))
    assert (error <= tolerance * np.tensordot(np.abs(wide), np.abs(weight), 1)).all()


@st.composite
def shapes(draw: st.DrawFn, columns: st.SearchStrategy[tuple[int, ...]], step: int = 1) -> Shape:
    """Draw sizes that are and are no multiples of tiles.

    step: K is a multiple of it and of the group.
    """
    group = draw(st.sampled_from(GROUPS))
    multiple = max(group, step)
    contracted = multiple * draw(st.integers(1, 512 // multiple))
    return Shape(draw(st.integers(1, 300)), contracted, draw(columns), group)
