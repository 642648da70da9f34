"""Products of few rows with a weight, by a kernel for a CPU, in steps that jax compiles."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.cpu_kernels.library import NUMBERS, check_instructions, target_name

# The most rows for which the kernel is faster than XLA, by instructions and numbers, as measured by
# benchmarks/cpu_products.py: with avx512 on a Zen 4, with avx2 on a Zen 3. With avx512 the kernel
# is faster up to 96 rows, but processors with AMX, whose matrix unit XLA uses and the kernel does
# not, multiply more rows than these by XLA sooner.
MAX_ROWS: Final[Mapping[str, Mapping[str, int]]] = MappingProxyType(
    {
        "avx512": MappingProxyType({"bfloat16": 32, "float32": 64, "int8": 32}),
        "avx2": MappingProxyType({"bfloat16": 96, "float32": 48, "int8": 12}),
    }
)


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
