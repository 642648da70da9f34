"""The Hopper kernel keeps the contract, in Pallas's interpreter of GPUs or on a GPU.

The interpreter runs copies, barriers and warpgroups, and finds races.
"""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.pallas_kernels.quantized_matmul import gpu
from jaxserve.pallas_kernels.quantized_matmul.gpu_plan import DEPTHS
from tests.pallas_kernels.hopper_kernels import interpreted_or_run, on_gpu
from tests.pallas_kernels.quantized_case import Shape, check, compiled, shapes
from tests.pallas_kernels.registers import multiply_from_registers

EXACT = 2**-20  # numbers of int4 and their products with bfloat16 are exact, and sums are float32

SHAPES = [
    Shape(1, 128, (64,), 128),
    Shape(5, 192, (2, 40), 32),
    Shape(16, 1024, (136,), 128),
    Shape(3, 2560, (8,), 128),  # more steps than stages: buffers are used again
    Shape(64, 320, (3, 5, 8), 64),
    Shape(130, 192, (128,), 32),
]


@pytest.fixture(autouse=True)
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not on_gpu():
        multiply_from_registers(monkeypatch)
    with interpreted_or_run(monkeypatch):
        yield
    compiled.cache_clear()


@pytest.mark.kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_times_a_weight_in_int4(shape: Shape) -> None:
    check(gpu, shape, EXACT)


# ---- many more, by `make test-kernels`


@pytest.mark.kernels
@pytest.mark.random_kernels
@pytest.mark.timeout(3600)
def test_random_rows_times_a_weight_in_int4() -> None:
    @settings(deadline=None, derandomize=True, database=None, max_examples=40)
    @given(shapes(st.tuples(st.integers(1, 3), st.sampled_from([8, 64, 104, 128])), DEPTHS[-1]))
    def run(shape: Shape) -> None:
        check(gpu, shape, EXACT)

    run()
