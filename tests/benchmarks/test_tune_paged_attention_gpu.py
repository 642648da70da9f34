"""What the tuner of the Hopper kernel makes of times; that they are those of a GPU nobody here can
say.
"""

import jax.numpy as jnp
import pytest

from benchmarks import tune_paged_attention_gpu as tuner
from jaxserve.pallas_kernels.paged_attention.api import KernelError, Layout
from jaxserve.pallas_kernels.paged_attention.gpu_plan import FEW, Sizes

LAYOUT = Layout(8, 128, 64, jnp.dtype(jnp.bfloat16))


def best(monkeypatch: pytest.MonkeyPatch, gain: float) -> Sizes:
    """Parts of 512 tokens save this share of one step of two; three thread blocks do not fit."""

    def timed(kind: str, sizes: Sizes, case: str, heads: int, layout: Layout) -> float:
        if sizes.per_core == 3:
            raise KernelError("do not fit")
        return 1.0 - gain * (sizes.split_tokens == 512 and case == "long")

    monkeypatch.setattr(tuner, "timed", timed)
    return tuner.best("few", 32, LAYOUT, ["long", "short"])[0]  # type: ignore[list-item]


def test_what_is_faster_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert best(monkeypatch, 0.3).split_tokens == 512


def test_the_default_stays_for_small_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    assert best(monkeypatch, 0.01) == FEW


@pytest.mark.parametrize("kind", tuner.DEFAULTS)
def test_candidates_are_distinct_and_the_default_is_tried(kind: str) -> None:
    found = list(tuner.candidates(kind))
    assert len(found) == len(set(found)) and tuner.DEFAULTS[kind] in found
