"""Sizes that the Hopper kernel takes and refuses before compiling, and how it shares work out."""

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.grouped_matmul import gpu
from jaxserve.pallas_kernels.grouped_matmul.api import Demand, KernelError, Options
from jaxserve.pallas_kernels.grouped_matmul.gpu_body import TOGETHER, Body, Inputs
from jaxserve.pallas_kernels.grouped_matmul.gpu_plan import NARROW, WIDE, plan_of
from jaxserve.pallas_kernels.hopper import SHARED_BYTES

BF16 = jnp.dtype(jnp.bfloat16)
F32 = jnp.dtype(jnp.float32)
H200 = Options(16, BF16, "NVIDIA H200")
QWEN = Demand(2432, 128, 2, 2048, 768, BF16, "NVIDIA H200")
INT8 = QWEN._replace(numbers=jnp.dtype("int8"), scales=1)


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"])
def test_hoppers_are_taken(kind: str) -> None:
    gpu.check(replace(H200, device_kind=kind), QWEN)


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA B200"])
def test_other_gpus_are_refused(kind: str) -> None:
    with pytest.raises(
        KernelError, match=rf"for Hopper .*; this is {kind} \(--grouped-matmul reference\)"
    ):
        gpu.check(replace(H200, device_kind=kind), QWEN)


@pytest.mark.parametrize(
    ("options", "demand", "reason"),
    [
        (
            replace(H200, block=24),
            QWEN._replace(rows=2400),
            r"blocks of 24 rows: the GPU kernel supports \(8, 16, 32, 64",
        ),
        (H200, QWEN._replace(rows=2440), "2440 rows cannot be cut into blocks of 16"),
        (
            H200,
            QWEN._replace(dtype=F32),
            r"float32 multiplied into bfloat16: .*--dtype bfloat16, or --grouped",
        ),
        (replace(H200, out_dtype=jnp.dtype("float16")), QWEN, "bfloat16 multiplied into float16"),
        (H200, QWEN._replace(contracted=2080), "2080 x 768 in bfloat16: .* of 64 x 64"),
        (H200, QWEN._replace(columns=96), "weights of 2048 x 96 in bfloat16: .* of 64 x 64"),
        (H200, QWEN._replace(columns=12), "weights of 2048 x 12 in bfloat16: .* of 16 bytes"),
        (
            replace(H200, out_dtype=F32),
            QWEN._replace(columns=48),
            "2048 x 48 in bfloat16: .* float32",
        ),
        (H200, INT8._replace(columns=352), "weights of 2048 x 352 in int8: .* of 64 x 64"),
        (H200, INT8._replace(columns=40), "weights of 2048 x 40 in int8: .* of 16 bytes"),
        (
            H200,
            INT8._replace(numbers=jnp.dtype("int4")),
            "weights of int4 with 1 scales of a column: .*--weights int8",
        ),
        (
            H200,
            INT8._replace(scales=16),
            "weights of int8 with 16 scales .* or --grouped-matmul reference",
        ),
    ],
)
def test_what_it_refuses(options: Options, demand: Demand, reason: str) -> None:
    with pytest.raises(KernelError, match=reason):
        gpu.check(options, demand)


@pytest.mark.parametrize(
    ("expected", "block"), [(0, 16), (4, 16), (9, 32), (33, 128), (64, 128), (900, 128)]
)
def test_few_experts_have_a_second_block(expected: int, block: int) -> None:
    assert gpu.block_rows(BF16, expected) == block
    gpu.check(replace(H200, block=block), QWEN._replace(rows=16 * block))


@pytest.mark.parametrize("block", gpu.BLOCKS)
@pytest.mark.parametrize("out_dtype", [BF16, F32])
@pytest.mark.parametrize("blocks", [1, 1000])
@pytest.mark.parametrize("demand", [QWEN, INT8], ids=["bfloat16", "int8"])
def test_stages_fit_into_shared_memory(
    block: int, out_dtype: jnp.dtype, blocks: int, demand: Demand
) -> None:
    plan = plan_of(Options(block, out_dtype, "NVIDIA H200"), demand._replace(rows=block * blocks))
    assert plan.columns == (WIDE if blocks == 1000 else NARROW) and plan.converts == (
        demand is INT8
    )
    stages = plan.stages * 64 * (2 * plan.rows + (2 + plan.converts) * plan.columns)
    besides = plan.rows * 64 * out_dtype.itemsize + 4 * plan.columns * plan.converts
    assert plan.stages >= 3 and stages + besides + 2048 <= SHARED_BYTES


@pytest.mark.parametrize("live", [0, 1, 7, 8, 9, 20, 131])
def test_every_tile_of_every_live_block_has_one_owner(live: int) -> None:
    """The blocks of a group take a tile of columns one after the other."""
    plan = plan_of(H200, QWEN)._replace(tiles=3, parts=2, columns=256)
    experts = np.arange(152) % 128
    body = Body(plan, Inputs(experts, [live], None, None), None, SimpleNamespace())
    units = [body._unit(jnp.int32(nth), jnp.int32(0), jnp.int32(live)) for nth in range(live * 6)]
    found = [(int(u.row) // 16, int(u.part), int(u.column) // 256) for u in units]
    assert sorted(found) == [
        (block, part, tile) for block in range(live) for part in range(2) for tile in range(3)
    ]
    assert all(u.expert == experts[block] for u, (block, *_) in zip(units, found, strict=True))
    assert all((part, tile) == (0, 0) for _, part, tile in found[: min(live, TOGETHER)])
