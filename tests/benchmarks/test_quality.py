"""Quality of quantized weights and pages: what is counted, and the bounds that are promised."""

import math

import numpy as np
import pytest

from benchmarks.quality import BOUNDS, GRID, Measurement, Quality, Scores, report, table
from benchmarks.quality_texts import LONGEST, SHORTEST, babyllama, bundled


def test_texts_and_prompts() -> None:
    subject = bundled(15, 20)
    assert len(subject.texts) == 15 and subject.longest <= 2048
    assert all(len(prompt) <= LONGEST for prompt in subject.prompts)
    assert len({tuple(prompt) for prompt in subject.prompts}) == 20
    assert any(not text.answer.all() for text in subject.texts), "questions do not count"


def test_text_of_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = babyllama(5, 20)
    if subject is None:
        pytest.skip("JAXSERVE_TEST_DATA names no folder with models/babyllama")
    assert subject.longest == 255 and len(subject.texts) == 5 and subject.texts[0].ids[0] == 1
    assert all(SHORTEST <= len(prompt) <= LONGEST and 0 not in prompt for prompt in subject.prompts)
    monkeypatch.delenv("JAXSERVE_TEST_DATA")
    assert babyllama(5, 20) is None


def test_perplexity() -> None:
    assert Scores(np.log([0.5, 0.125]), np.zeros(2)).perplexity == pytest.approx(math.sqrt(16))


def test_the_table() -> None:
    """In the order of the grid, whatever came first; what was not measured is left empty."""
    late = Quality("m", "int8", "auto", 10, 2.02, 0.01001, 0.9, 0.95, 0.5)
    grid = table([late, Quality("m", "auto", "auto", 10, 2.0, 0.0, 1.0)])
    assert grid.rows[0] == ("auto", "auto", "2.0000", "+0.00%", "100.00%", "", "", "")
    assert grid.rows[1] == (
        "int8",
        "auto",
        "2.0200",
        "+1.00%",
        "90.00%",
        "95.00%",
        "50.00%",
        "1.0%",
    )
    assert late.broken and not Quality("m", "int8", "auto", 10, 2.0, 0.0099, 1.0).broken
    assert set(BOUNDS) < set(GRID)
    about = {"jaxserve": "1", "jax": "2", "date": "3", "command": "c"}
    assert "20 prompts, 16 to" in report(about, [bundled(5, 20)], [late])


@pytest.fixture(scope="module")
def measurement() -> Measurement:
    return Measurement(bundled(15, 30))


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "kv"), BOUNDS, ids=map("-".join, BOUNDS))
def test_bounds(weights: str, kv: str, measurement: Measurement) -> None:
    """Of perplexity, and not without a trace, or nothing would be rounded."""
    found = measurement.of(weights, kv)
    assert found.change != 0 == measurement.plain.change and not found.broken
    assert found.first > 0.97 and found.greedy is not None and found.greedy > 0.9
