"""Pages of 8 bits stay near full precision: at the kernel, however much is read, and in a model's perplexity."""

import pytest

from benchmarks.kv_pages import attention_error, held_out, perplexity

BOUNDS = {"float32": 1e-5, "bfloat16": 5e-3, "int8": 0.02, "fp8": 0.06}


@pytest.mark.parametrize(("kv", "bound"), BOUNDS.items())
def test_the_error_does_not_grow_with_the_length(kv: str, bound: float) -> None:
    short, long = (attention_error(kv, length, spread=1, trials=2) for length in (100, 4000))
    assert bound / 20 < short < bound or kv == "float32"
    assert long < bound and long < 1.5 * short


@pytest.mark.slow
def test_perplexity_stays_within_half_a_percent() -> None:
    """But not the same to the last digit: prompts are scored from pages."""
    texts = held_out(12, 1)
    whole = perplexity("auto", texts)
    for kv in ("int8", "fp8"):
        found = perplexity(kv, texts)
        assert found != whole and abs(found / whole - 1) < 0.005
