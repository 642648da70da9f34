"""Sizes that the kernels for int4 in groups take and refuse before compiling, and their tiles."""

from dataclasses import replace
from itertools import product

import jax.numpy as jnp
import pytest

from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.pallas_kernels.grouped_matmul.tpu_plan import VECTOR_MEMORY
from jaxserve.pallas_kernels.hopper import SHARED_BYTES
from jaxserve.pallas_kernels.quantized_matmul import gpu, gpu_plan, tpu, tpu_plan
from jaxserve.pallas_kernels.quantized_matmul.api import GROUPS, Demand, Options

BF16 = jnp.dtype(jnp.bfloat16)
H200 = Options("NVIDIA H200")
V5E = Options("TPU v5 lite")
GATE_UP = Demand(4096, (2, 14336), 128, BF16)


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA B200"])
def test_other_gpus_are_refused(kind: str) -> None:
    gpu.check(H200, GATE_UP)
    with pytest.raises(
        KernelError, match=rf"for Hopper .*; this is {kind} \(--quantized-matmul reference\)"
    ):
        gpu.check(replace(H200, device_kind=kind), GATE_UP)


@pytest.mark.parametrize(
    ("demand", "reason"),
    [
        (
            GATE_UP._replace(dtype=jnp.dtype("float32")),
            r"activations of float32: .*\(--dtype bfloat16, or --quantized",
        ),
        (
            GATE_UP._replace(group=16),
            r"groups of 16 numbers: the GPU kernel supports \(32, 64, 128\)",
        ),
        (
            GATE_UP._replace(contracted=96, group=32),
            "a weight of 96 x 28672: the GPU kernel supports multiples of 64 x 8",
        ),
        (GATE_UP._replace(columns=(90,)), "a weight of 4096 x 90: "),
    ],
)
def test_what_the_gpu_kernel_refuses(demand: Demand, reason: str) -> None:
    with pytest.raises(KernelError, match=reason):
        gpu.check(H200, demand)


@pytest.mark.parametrize(
    ("demand", "reason"),
    [
        (
            GATE_UP._replace(dtype=jnp.dtype("float32")),
            r"activations of float32: .*\(--dtype bfloat16, or --quantized",
        ),
        (
            GATE_UP._replace(group=16),
            r"groups of 16 numbers: the TPU kernel supports \(32, 64, 128\)",
        ),
        (
            GATE_UP._replace(columns=(2, 90)),
            "a weight in 2 parts of 90 columns: on a TPU they are multiples of 128",
        ),
        (GATE_UP._replace(columns=(3, 64)), "a weight in 3 parts of 64 columns"),
        (GATE_UP._replace(transposed=True), "a weight whose last dimension is summed over"),
        (
            GATE_UP._replace(contracted=2**22),
            r"a sum over 4194304 numbers leaves no room in 134217728 bytes",
        ),
    ],
)
def test_what_the_tpu_kernel_refuses(demand: Demand, reason: str) -> None:
    with pytest.raises(KernelError, match=reason):
        tpu.check(V5E, demand)


def test_a_tpu_weight_without_room_for_its_converted_tile_is_refused() -> None:
    """One block of rows would fit: only several blocks need the tile's converted copy."""
    v4 = Options("TPU v4")
    demand = GATE_UP._replace(contracted=7168, columns=(4, 32), group=32)
    tpu_plan.plan_of(256, 7168, 4, 32, 32, "TPU v4")
    with pytest.raises(KernelError, match="leaves no room"):
        tpu_plan.plan_of(257, 7168, 4, 32, 32, "TPU v4")
    with pytest.raises(KernelError, match="leaves no room"):
        tpu.check(v4, demand)


@pytest.mark.parametrize("columns", [(90,), (8, 6, 128), (8, 10, 64), (4, 32), (8192,)], ids=str)
@pytest.mark.parametrize("kind", [*VECTOR_MEMORY, "cpu"])
def test_weights_that_the_tpu_kernel_takes(columns: tuple[int, ...], kind: str) -> None:
    tpu.check(Options(kind), GATE_UP._replace(columns=columns))


@pytest.mark.parametrize("kind", [*VECTOR_MEMORY, "cpu"])
@pytest.mark.parametrize(
    ("contracted", "parts", "columns"),
    [
        (4096, 2, 14336),
        (14336, 1, 4096),
        (4096, 48, 128),
        (3072, 36, 64),
        (1024, 1, 8200),
        (8192, 2, 1792),
    ],
)
def test_a_tpu_s_tiles_cover_a_weight(kind: str, contracted: int, parts: int, columns: int) -> None:
    for group, rows in product(GROUPS, (1, 16, 128, 129, 256, 257, 4096)):
        plan = tpu_plan.plan_of(rows, contracted, parts, columns, group, kind)
        assert parts % plan.parts == 0 and (columns % plan.columns == 0 or parts == 1)
        assert plan.parts == 1 or plan.columns == columns
        assert plan.parts * plan.columns % 128 == 0 or plan.parts == parts
        assert contracted % plan.chunk == 0 and plan.chunk % group == 0
        assert (
            plan.keeps_converted == (rows > plan.rows)
            and plan.limit <= VECTOR_MEMORY.get(kind, 16) * 2**20
        )


@pytest.mark.parametrize(
    ("contracted", "columns"), [(4096, 28672), (14336, 4096), (2880, 5120), (128, 8), (1024, 8192)]
)
def test_a_gpu_s_units_cover_a_product_and_its_stages_fit(contracted: int, columns: int) -> None:
    for group, rows in product(GROUPS, (1, 8, 9, 64, 65, 300, 4096)):
        whole = contracted - contracted % group
        plan = gpu_plan.plan_of(rows, whole, columns, group, "NVIDIA H200")
        assert plan.rows * plan.row_tiles >= rows and plan.columns * plan.column_tiles >= columns
        assert plan.steps * plan.depth == whole and 1 <= plan.splits <= plan.steps
        assert plan.splits == 1 or plan.units <= plan.cores
        stage = plan.depth * (plan.columns // 2 + 2 * plan.rows) + max(
            plan.scales * plan.columns * 4, 1024
        )
        assert (
            plan.stages >= 4
            and plan.stages * stage + plan.columns * plan.staged * 4 + 2048 <= SHARED_BYTES
        )
