"""Sizes that the TPU kernel takes and refuses before compiling, and the tiles that it cuts."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxserve.pallas_kernels.grouped_matmul import tpu
from jaxserve.pallas_kernels.grouped_matmul.api import Demand, KernelError, Options
from jaxserve.pallas_kernels.grouped_matmul.tpu_plan import (
    LARGEST_TILE_BYTES,
    VECTOR_MEMORY,
    plan_of,
)

BF16 = jnp.dtype(jnp.bfloat16)
F32 = jnp.dtype(jnp.float32)
V5E = Options(16, BF16, "TPU v5 lite")
QWEN = Demand(2432, 128, 2, 2048, 768, BF16, "TPU v5 lite")


@pytest.mark.parametrize(
    ("options", "demand", "reason"),
    [
        (replace(V5E, block=24), QWEN, "2432 rows cannot be cut into blocks of 24"),
        (
            replace(V5E, block=8),
            QWEN,
            "blocks of 8 rows: on a TPU, in bfloat16, they are multiples of 16",
        ),
        (replace(V5E, block=4), QWEN._replace(dtype=F32), "blocks of 4 rows: .* multiples of 16"),
        (
            V5E,
            QWEN._replace(dtype=jnp.dtype("float16")),
            r"float16 .*supports float32 and bfloat16 \(--dtype bfloat16\)",
        ),
        (
            V5E,
            QWEN._replace(numbers=jnp.dtype("uint8"), scales=1),
            "weights of uint8: the TPU kernel supports int8, float8",
        ),
        (
            V5E,
            QWEN._replace(numbers=jnp.dtype("int4"), contracted=1920, scales=20),
            "scales of 96 numbers .* divide 1024",
        ),
        (
            V5E,
            QWEN._replace(numbers=jnp.dtype("int8"), scales=9),
            "9 scales for 2048 numbers of a column",
        ),
        (replace(V5E, out_dtype="float16"), QWEN, "bfloat16 multiplied into float16"),
        (
            V5E,
            QWEN._replace(rows=16 * 2**17 + 16),
            r"take 524292 bytes of scalar memory; .* 524288 \(--step-tokens\)",
        ),
        (
            V5E,
            QWEN._replace(contracted=2**18 + 1),
            "no room in 134217728 bytes of vector memory .* 2 x 262145 x 768",
        ),
    ],
)
def test_what_it_refuses(options: Options, demand: Demand, reason: str) -> None:
    with pytest.raises(KernelError, match=reason):
        tpu.check(options, demand)


def test_blocks_of_half_precision_results_are_as_tall_as_theirs() -> None:
    tpu.check(Options(8, F32, "TPU v4"), QWEN._replace(dtype=F32))
    with pytest.raises(KernelError, match="blocks of 8 rows"):
        tpu.check(Options(8, BF16, "TPU v4"), QWEN._replace(dtype=F32))


@pytest.mark.parametrize(
    ("expected", "block"),
    [(0, 16), (1, 16), (4, 16), (9, 32), (16, 32), (64, 128), (128, 128), (129, 256), (900, 256)],
)
def test_few_experts_have_a_second_block(expected: int, block: int) -> None:
    assert tpu.block_rows(BF16, expected) == block
    tpu.check(Options(block, BF16, "TPU v4"), QWEN._replace(rows=block, dtype=F32))


@pytest.mark.parametrize("kind", [*VECTOR_MEMORY, "cpu"])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("block", [16, 256])
@pytest.mark.parametrize(
    ("parts", "contracted", "columns"),
    [
        (2, 4096, 14336),
        (1, 14336, 4096),
        (2, 2048, 768),
        (2, 2880, 2880),
        (1, 2048, 7168),
        (2, 7168, 2048),
        (1, 40, 24),
    ],
)
def test_tiles_fit_and_cover_a_weight(
    kind: str, dtype: jnp.dtype, block: int, parts: int, contracted: int, columns: int
) -> None:
    demand = Demand(10 * block, 8, parts, contracted, columns, dtype, kind)
    plan = plan_of(Options(block, BF16, kind), demand)
    tile = parts * plan.contracted * plan.columns * dtype.itemsize
    assert 2 * tile < plan.vmem < plan.limit <= VECTOR_MEMORY.get(kind, 16) * 2**20
    assert tile <= LARGEST_TILE_BYTES or plan.columns == 128
    assert contracted % plan.contracted == 0 and (
        plan.contracted == contracted or plan.contracted % 128 == 0
    )
    assert plan.columns == columns or (plan.columns % 128 == 0 and plan.columns < columns)


def test_a_decode_step_reads_a_weight_once() -> None:
    """A tile has all of K, so that a second block of an expert finds it in memory."""
    for kind in VECTOR_MEMORY:
        for sizes in ((2, 4096, 14336), (1, 14336, 4096), (2, 7168, 2048), (2, 2880, 2880)):
            demand = Demand(160, 8, *sizes, BF16, kind)
            assert plan_of(Options(16, BF16, kind), demand).contracted == demand.contracted
