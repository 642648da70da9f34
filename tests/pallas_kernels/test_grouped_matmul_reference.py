"""The reference is right against numpy and refuses what is no product.

Its memory is that of one expert's weight.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.pallas_kernels.grouped_matmul import reference
from jaxserve.pallas_kernels.grouped_matmul.api import Demand, Groups, Options
from jaxserve.plan.hlo.inspection import find_copies, parse
from tests.pallas_kernels.grouped_case import BF16, QUANTIZED, SHAPES, Shape, check, shapes

F32 = jnp.dtype("float32")


@pytest.mark.parametrize("shape", [*SHAPES, *QUANTIZED], ids=str)
def test_rows_times_their_experts_weight(shape: Shape) -> None:
    check(reference, shape)


@settings(deadline=None, derandomize=True, database=None, max_examples=12)
@given(shapes(np.float32, blocks=(1, 4, 8)))
def test_random_rows_times_their_experts_weight(shape: Shape) -> None:
    check(reference, shape)


@pytest.mark.parametrize("scales", [0, 1, 8])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_it_needs_one_experts_weight(dtype: type, scales: int) -> None:
    """Memory holds one weight and the result, and no copy of all weights in any dtype."""
    experts = 16
    parts = 2
    contracted = 256
    columns = 128
    block = 8
    blocks = 20
    x = jax.ShapeDtypeStruct((blocks * block, contracted), dtype)
    weight = jax.ShapeDtypeStruct(
        (experts, parts, contracted, columns), np.int8 if scales else dtype
    )
    scale = jax.ShapeDtypeStruct((experts, parts, scales, columns), np.float32) if scales else None
    groups = Groups(jax.ShapeDtypeStruct((blocks,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32))
    options = Options(block, jnp.dtype(dtype))
    multiply = jax.jit(lambda *operands: reference.multiply(*operands[:3], options, operands[3]))
    compiled = multiply.lower(x, weight, groups, scale).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    weight_bytes = parts * contracted * columns * 4  # the largest form that any CPU multiplies
    result_bytes = blocks * block * parts * columns * np.dtype(dtype).itemsize
    assert memory.temp_size_in_bytes < 2 * weight_bytes + result_bytes
    assert not find_copies(parse(compiled.as_text() or ""), set(), {weight.size})


@pytest.mark.parametrize(("rows", "block"), [(1, 1), (4, 4), (5, 8), (100, 128), (5000, 256)])
def test_blocks_are_as_large_as_experts_are_expected_to_be(rows: int, block: int) -> None:
    assert reference.block_rows(F32, rows) == block


@pytest.mark.parametrize(
    ("block", "dtype", "reason"),
    [
        (16, "float32", "40 rows cannot be cut into blocks of 16"),
        (0, "float32", "40 rows cannot be cut into blocks of 0"),
        (8, "int8", "rows and weights of int8: a grouped product is one of floating point numbers"),
    ],
)
def test_what_it_refuses(block: int, dtype: str, reason: str) -> None:
    with pytest.raises(KernelError, match=reason):
        reference.check(Options(block, F32), Demand(40, 4, 1, 64, 64, jnp.dtype(dtype), "cpu"))
