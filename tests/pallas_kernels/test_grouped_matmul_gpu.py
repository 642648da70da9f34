"""The Hopper kernel keeps the contract, in Pallas's interpreter of GPUs or on a GPU.

The interpreter runs copies, barriers and warpgroups, and finds races.
"""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from jaxserve.pallas_kernels.grouped_matmul import gpu
from jaxserve.pallas_kernels.grouped_matmul.gpu_plan import NARROW, WIDE, plan_of
from tests.pallas_kernels.grouped_case import BF16, Shape, check, compiled, shapes
from tests.pallas_kernels.hopper_kernels import interpreted_or_run
from tests.slow_cases import slow_but

FLOAT8 = ml_dtypes.float8_e4m3fn
KEPT = ((None, 0), (np.int8, 0), (FLOAT8, 0))
NARROW_SHAPES = [
    Shape((5,), 64, 128, spare=0, dtype=BF16, out_dtype=BF16),
    Shape((0, 3, 0), 40, 56, dtype=BF16, out_dtype=BF16),
    Shape((0, 3, 0), 40, 24, dtype=BF16),
    Shape((0, 0, 0, 0), 64, 64, dtype=BF16, out_dtype=BF16),
    Shape((0, 60, 0, 70), 192, 192, block=64, dtype=BF16, out_dtype=BF16),
    Shape((130, 0), 128, 64, block=128, spare=0, dtype=BF16, out_dtype=BF16),
    Shape((5, 0, 3), 40, 48, dtype=BF16, out_dtype=BF16, numbers=np.int8, scales=1),
    Shape((5, 0, 3), 64, 32, dtype=BF16, numbers=FLOAT8, scales=1),
    Shape((0, 60, 70), 192, 192, block=64, dtype=BF16, out_dtype=BF16, numbers=FLOAT8, scales=1),
    Shape((130, 0), 448, 64, block=128, spare=0, dtype=BF16, numbers=np.int8, scales=1),
]
WIDE_SHAPES = [
    Shape((0, 3, 0, 0, 40, 1, 0, 16), 128, 192, parts=2, dtype=BF16, out_dtype=BF16),
    Shape((1,) * 8 + (17, 0, 5), 192, 64, block=8, spare=2, dtype=BF16),
    Shape((1,) * 8 + (17, 0, 5), 192, 64, block=8, spare=2, dtype=BF16, out_dtype=BF16),
    Shape((100, 129, 3), 128, 320, block=128, dtype=BF16, out_dtype=BF16),
    Shape((33, 0, 5, 1), 56, 320, parts=2, block=32, dtype=BF16, out_dtype=BF16),
    Shape((0, 3, 0, 0, 40, 1, 0, 16), 128, 192, parts=2, dtype=BF16, numbers=np.int8, scales=1),
    Shape(
        (33, 0, 5, 1),
        56,
        320,
        parts=2,
        block=32,
        dtype=BF16,
        out_dtype=BF16,
        numbers=FLOAT8,
        scales=1,
    ),
]

SHAPES = [*NARROW_SHAPES, *WIDE_SHAPES]
QUICK_SHAPES = [*NARROW_SHAPES[::2], WIDE_SHAPES[0], WIDE_SHAPES[-1]]


@pytest.fixture(autouse=True)
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with interpreted_or_run(monkeypatch):
        yield
    compiled.cache_clear()


@pytest.mark.kernels
@pytest.mark.parametrize("shape", slow_but(SHAPES, QUICK_SHAPES), ids=str)
def test_rows_times_their_experts_weight(shape: Shape) -> None:
    assert plan_of(shape.options, shape.demand).columns == (
        WIDE if shape in WIDE_SHAPES else NARROW
    )
    check(gpu, shape)


# ---- many more, by `make test-kernels`


@pytest.mark.kernels
@pytest.mark.random_kernels
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", gpu.BLOCKS)
def test_random_rows_times_their_experts_weight(block: int) -> None:
    @settings(deadline=None, derandomize=True, database=None, max_examples=40)
    @given(shapes(BF16, blocks=(block,), kept=KEPT))
    def run(shape: Shape) -> None:
        check(gpu, shape)

    run()
