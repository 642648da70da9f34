"""The TPU kernel keeps the contract, in Pallas's TPU interpreter."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.quantized_matmul import tpu, tpu_plan
from tests.pallas_kernels.quantized_case import Shape, check, compiled, shapes

EXACT = 2**-20  # where products of groups are scaled
ROUNDED = 2**-9  # where numbers are scaled, and rounded to bfloat16
SHAPES = [
    Shape(1, 128, (64,), 128),
    Shape(16, 1024, (640,), 128),
    Shape(5, 96, (2, 128), 32),
    Shape(64, 2048, (3, 2, 128), 64),
    Shape(3, 256, (3, 4, 64), 128),
    Shape(2, 2048, (128,), 128),  # a sum in two chunks
    Shape(40, 320, (2, 640), 64),
    Shape(130, 192, (96,), 32),
    Shape(300, 2560, (2, 128), 128),
    Shape(257, 384, (520,), 32),
]


@pytest.fixture(autouse=True)
def interpreted_kernels() -> Iterator[None]:
    compiled.cache_clear()
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    compiled.cache_clear()


def tolerance(shape: Shape) -> float:
    exact = shape.group == tpu.EXACT_GROUP and shape.rows <= tpu_plan.HEIGHTS[0]
    return EXACT if exact else ROUNDED


@pytest.mark.kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_times_a_weight_in_int4(shape: Shape) -> None:
    check(tpu, shape, tolerance(shape))


@pytest.mark.kernels
def test_tiles_of_a_small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles in a small memory are narrow, with several to a part."""
    monkeypatch.setattr(tpu_plan, "LEAST_MEMORY", 3)
    shape = Shape(300, 1024, (2, 256), 64)
    plan = tpu_plan.plan_of(300, 1024, 2, 256, 64, "cpu")
    assert (plan.rows, plan.parts, plan.columns, plan.keeps_converted) == (128, 1, 128, True)
    check(tpu, shape, ROUNDED)


# ---- many more, by `make test-kernels`


@pytest.mark.kernels
@pytest.mark.random_kernels
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_random_rows_times_a_weight_in_int4(parts: int) -> None:
    widths = [128, 256, 640] if parts > 1 else [8, 96, 128, 520, 640]

    @settings(deadline=None, derandomize=True, database=None, max_examples=40)
    @given(shapes(st.tuples(st.just(parts), st.sampled_from(widths))))
    def run(shape: Shape) -> None:
        check(tpu, shape, tolerance(shape))

    run()
