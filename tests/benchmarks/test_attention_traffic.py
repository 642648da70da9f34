"""What is counted is what the kernel copies, and near the floor."""

import math
from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from benchmarks.attention_traffic import CONTEXTS, ROWS, SHAPES, spread, traffic
from jaxserve.pallas_kernels.paged_attention import tpu, tpu_body
from jaxserve.pallas_kernels.paged_attention.api import Options
from tests.pallas_kernels.attention_case import TOKENS, Case, Shape, compiled
from tests.slow_cases import slow_but

CASES = [
    Shape(heads=4, kv_heads=2, head_dim=128, page_size=16, width=9),
    Shape(heads=4, kv_heads=2, head_dim=64, page_size=8, width=80, window=64),
    Shape(heads=4, kv_heads=2, head_dim=64, page_size=128, width=5, stored=np.int8),
    Shape(heads=2, kv_heads=1, head_dim=36, page_size=16, width=9, value_dim=32),
]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every copy that the kernel starts while it runs."""
    started: list[int] = []

    def make_async_copy(source: Any, target: Any, semaphore: Any) -> SimpleNamespace:
        copy = pltpu.make_async_copy(source, target, semaphore)
        size = math.prod(target.shape) * target.dtype.itemsize

        def start() -> None:
            jax.debug.callback(lambda: started.append(size))
            copy.start()

        return SimpleNamespace(start=start, wait=copy.wait)

    monkeypatch.setattr(tpu_body, "pltpu", SimpleNamespace(make_async_copy=make_async_copy))
    return started


def counted(
    shape: Shape, cached: list[int], new: list[int], decode: bool, copied: list[int]
) -> tuple[int, int]:
    """Bytes of the kernel's own copies, as it makes them and as `traffic` counts them."""
    compiled.cache_clear()
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        case = Case(tpu, shape, cached, new)
        case.run(len(new) if decode else TOKENS, decode=decode)
        jax.effects_barrier()
    compiled.cache_clear()
    options = Options(shape.layout, 1.0, shape.window, max_row_tokens=1 if decode else None)
    moved, _ = traffic(options, shape.heads, cached, new, num_tokens=len(new) if decode else TOKENS)
    return sum(copied), moved.pages + moved.inserted


@pytest.mark.kernels
@pytest.mark.parametrize("shape", slow_but(CASES, CASES[1:3]), ids=str)
def test_a_decode_copies_what_is_counted(shape: Shape, copied: list[int]) -> None:
    cached = [37, shape.page_size - 1, shape.page_size, shape.context - 1, 0]
    ours, theirs = counted(shape, cached, [1, 1, 1, 1, 0], True, copied)
    assert ours == theirs


@pytest.mark.kernels
@pytest.mark.parametrize("shape", slow_but(CASES, [CASES[1], CASES[3]]), ids=str)
def test_chunks_copy_what_is_counted(shape: Shape, copied: list[int]) -> None:
    ours, theirs = counted(
        shape, [37, 0, shape.page_size - 1, 40, 0], [1, 33, 17, 20, 0], False, copied
    )
    assert ours == theirs


@pytest.mark.parametrize("name", ["Llama-3-8B", "Llama-3-8B, 1 of 8 shards"])
def test_a_decode_is_within_five_percent_of_the_floor(name: str) -> None:
    layout, heads = SHAPES[name]
    assert layout.dtype == ml_dtypes.bfloat16
    for rows in ROWS:
        for context in CONTEXTS:
            moved, _ = traffic(
                Options(layout, 1.0, max_row_tokens=1),
                heads,
                spread(context, rows, layout.page_size),
                [1] * rows,
            )
            assert 1 < moved.over_floor < 1.05 and moved.pages == moved.floor
