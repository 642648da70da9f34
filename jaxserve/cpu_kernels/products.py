"""Products of few rows with a weight, by a kernel for a CPU, in steps that jax compiles."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.cpu_kernels.library import NUMBERS, check_instructions, target_name
from jaxserve.cpu_kernels.processor import processor


class MaxRows(NamedTuple):
    """The most rows of each kind of numbers that the kernel multiplies; XLA multiplies more."""

    bfloat16: int
    float32: int
    int8: int


# Up to which number of rows the kernel is faster than XLA, by instructions, as measured by
# benchmarks/cpu_products.py: with avx512 on a Zen 4, with avx2 on a Zen 3.
MAX_ROWS: Final[Mapping[str, MaxRows]] = MappingProxyType(
    {
        "avx512": MaxRows(bfloat16=96, float32=96, int8=64),
        "avx2": MaxRows(bfloat16=96, float32=48, int8=12),
    }
)
# On a processor with AMX, whose matrix unit XLA uses and the kernel does not. Not measured.
MAX_ROWS_BESIDE_AMX: Final = MaxRows(bfloat16=32, float32=64, int8=32)


@dataclass(frozen=True)
class CpuProduct:
    """How a CPU multiplies by weights: a few rows by the kernel, and more of them by XLA.

    Attributes:
        instructions: One of library.INSTRUCTIONS, which the kernel uses.
        is_measured: Whether max_rows were measured with the model's own shapes.
    """

    instructions: str
    max_rows: MaxRows
    is_measured: bool = False

    @classmethod
    def of(cls, instructions: str) -> "CpuProduct":
        """Return the committed choice for this processor."""
        has_amx = instructions == "avx512" and processor().has_amx
        max_rows = MAX_ROWS_BESIDE_AMX if has_amx else MAX_ROWS[instructions]
        return cls(instructions, max_rows)


def multiply(
    x: Float[Array, "R K"] | Int[Array, "R K"],
    weight: Float[Array, "N K"] | Int[Array, "N K"],
    instructions: str,
) -> Float[Array, "R N"] | Int[Array, "R N"]:
    """Return x times the transposed weight: float32, or int32 for int8, which is exact.

    A row's results depend neither on the other rows nor on which thread computes them. Subnormal
    numbers count as zero, as in XLA's own products on a CPU.

    Args:
        x: Rows of bfloat16, float32 or int8 numbers, any number of them.
        weight: Numbers of the same kind, in the order in which checkpoints have them.
        instructions: One of `supported()`.
    """
    numbers = x.dtype.name
    if numbers not in NUMBERS or weight.dtype != x.dtype:
        raise TypeError(
            f"x is {numbers} and the weight {weight.dtype.name}; "
            f"both have to be the same of {', '.join(NUMBERS)}"
        )
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x is {list(x.shape)} and the weight {list(weight.shape)}; "
            "they have to be [R, K] and [N, K]"
        )
    check_instructions(instructions)
    sums = jnp.int32 if numbers == "int8" else jnp.float32
    result = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), sums)
    return jax.ffi.ffi_call(target_name(numbers, instructions), result)(x, weight)
