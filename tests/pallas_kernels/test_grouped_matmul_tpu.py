"""The TPU kernel keeps the contract, in Pallas's TPU interpreter, whatever is in padding."""

from collections.abc import Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.grouped_matmul import tpu
from jaxserve.pallas_kernels.grouped_matmul.tpu_plan import Plan
from tests.pallas_kernels.grouped_case import (
    BF16,
    QUANTIZED,
    SHAPES,
    Shape,
    check,
    compiled,
    shapes,
)

INT8 = np.int8
INT4 = ml_dtypes.int4
# shapes, and tiles that they would not have at this size: parts of K, of columns, with and without
# a rest
TILED = [
    (Shape((0, 3, 40, 16), 256, 384, parts=2), Plan(256, 128, 0, 2**24)),
    (Shape((17, 0, 5), 200, 320), Plan(200, 128, 0, 2**24)),
    (Shape((0, 3, 40, 16), 384, 384, parts=2), Plan(128, 384, 0, 2**24)),
    (Shape((20, 0, 5), 256, 320, parts=2, dtype=BF16, out_dtype=BF16), Plan(128, 256, 0, 2**24)),
    (Shape((9, 20), 128, 1200, dtype=BF16), Plan(128, 1200, 0, 2**24)),
    (Shape((9, 20), 384, 384, parts=2, numbers=INT8, scales=1), Plan(128, 256, 0, 2**24)),
    (Shape((9, 0, 20), 512, 256, parts=2, numbers=INT4, scales=16), Plan(256, 128, 0, 2**24)),
    (
        Shape((9,), 2336, 640, numbers=INT4, scales=73),
        Plan(2336, 640, 0, 2**24),
    ),  # in turns over both
]


@pytest.fixture(autouse=True)
def interpreted_kernels() -> Iterator[None]:
    compiled.cache_clear()
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    compiled.cache_clear()


@pytest.mark.kernels
@pytest.mark.parametrize("shape", [*SHAPES, *QUANTIZED], ids=str)
def test_rows_times_their_experts_weight(shape: Shape) -> None:
    check(tpu, shape)


@pytest.mark.kernels
@pytest.mark.parametrize(("shape", "plan"), TILED, ids=str)
def test_weights_in_tiles(shape: Shape, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "plan_of", lambda *_: plan)
    check(tpu, shape)


# ---- many more, by `make test-kernels`

many_examples = settings(deadline=None, derandomize=True, database=None, max_examples=60)


@pytest.mark.kernels
@pytest.mark.random_kernels
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_random_rows_times_their_experts_weight(dtype: type) -> None:
    @many_examples
    @given(shapes(dtype, blocks=(16, 32)))
    def run(shape: Shape) -> None:
        check(tpu, shape)

    run()


@pytest.mark.kernels
@pytest.mark.random_kernels
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("contracted", [128, 256])
def test_random_rows_times_weights_in_tiles(
    contracted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tpu, "plan_of", lambda *_: Plan(contracted, 128, 0, 2**24))

    @many_examples
    @given(shapes(np.float32, blocks=(8, 16)))
    def run(shape: Shape) -> None:
        compiled.cache_clear()
        check(tpu, replace(shape, contracted=256, scales=min(shape.scales, 8)))

    run()
