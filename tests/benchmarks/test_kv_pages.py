"""Attention over pages of 8 bits stays near full precision however much it reads."""

import pytest

from benchmarks.kv_pages import attention_error

BOUNDS = {"float32": 1e-5, "bfloat16": 5e-3, "int8": 0.02, "fp8": 0.06}


@pytest.mark.parametrize(("kv", "bound"), BOUNDS.items())
def test_the_error_does_not_grow_with_the_length(kv: str, bound: float) -> None:
    short, long = (attention_error(kv, length, spread=1, trials=2) for length in (100, 4000))
    assert bound / 20 < short < bound or kv == "float32"
    assert long < bound and long < 1.5 * short


@pytest.mark.parametrize(("kv", "factor"), [("int8", 4), ("fp8", 1.5)])
def test_heavy_tails(kv: str, factor: float) -> None:
    """Steps of int8 grow with the largest number of a token, those of fp8 with each number: it
    minds less.
    """
    normal, heavy = (
        attention_error(kv, 2000, 1, numbers, trials=2) for numbers in ("normal", "heavy-tailed")
    )
    assert normal / factor < heavy < normal * factor
