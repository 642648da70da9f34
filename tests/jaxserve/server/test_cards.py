"""What an operator reads about a model's recurrent states when it is loaded."""

from dataclasses import replace
from typing import Any

import pytest

from jaxserve.config import EngineOptions, resolve
from jaxserve.engine.device.memory import state_sizes
from jaxserve.models.spec import ModelSpec
from jaxserve.server.cards import states_card, states_text
from tests.jaxserve.engine.tiny import SPEC, STATES
from tests.jaxserve.server.harness import ENGINE

OPTIONS = EngineOptions(max_batch=4, page_size=4, step_tokens=32, cache_tokens=4096)


def told(spec: ModelSpec, options: EngineOptions) -> str:
    """Return what is said of the states; empty for a model without any."""
    config = resolve(
        options, max_positions=96, lanes=2, affordable_tokens=0, states=state_sizes(spec)
    )
    card = states_card(spec, config)
    return states_text(replace(ENGINE, lanes=2), card) if card else ""


def test_sequences_snapshots_and_what_they_take() -> None:
    """Two layers with 256 numbers in matrices, and 3 x 64 inputs: 3,584 bytes.

    A token has 2 x 2 x 8 numbers in the one layer with attention: 128 bytes.
    """
    options = replace(OPTIONS, snapshot_share=0.5, snapshot_interval=64)
    assert told(STATES, options) == (
        "4 sequences and 146 snapshots a lane, one behind every 64 tokens of a prompt; each takes "
        "0.0 MB on all of its devices together, as the pages of 28 tokens do"
    )


@pytest.mark.parametrize("changes", [{"prefix_cache": False}, {"snapshot_share": 0.0}])
def test_without_snapshots(changes: dict[str, Any]) -> None:
    options = replace(OPTIONS, **changes)
    assert told(STATES, options).startswith("4 sequences and 0 snapshots a lane; each takes")


def test_a_model_without_states() -> None:
    assert told(SPEC, OPTIONS) == ""
