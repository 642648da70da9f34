"""Thoughts of earlier answers, as chat templates take them."""

from collections.abc import Collection
from typing import Any

from jaxserve.chat.messages import OF_THE_MODEL
from jaxserve.chat.turns import BETWEEN, Turns

GIVEN = "reasoning_content"  # key of thoughts in what this server answers
OTHER = "thinking"  # that of gpt-oss


def with_thoughts(turns: Turns, read: Collection[str], channels: bool) -> Turns:
    """Return turns in which thoughts have the key that the template reads.

    In Harmony (`channels`) thoughts before the last answer proper are left out, as the format has
    it, and a text beside calls is the end of the thought, as the template has one place for both.

    Args:
        read: Attributes and keys that the template reads.
    """
    if not has_other_key(read):
        return turns
    renamed = [_renamed(turn) if turn["role"] == OF_THE_MODEL else turn for turn in turns]
    if not channels:
        return renamed
    answers = [i for i, turn in enumerate(turns) if turn["role"] == OF_THE_MODEL]
    finals = [i for i in answers if not turns[i].get("tool_calls")]
    last = finals[-1] if finals else 0
    return [_in_channels(turn, i < last) for i, turn in enumerate(renamed)]


def has_other_key(read: Collection[str]) -> bool:
    """Return whether a template reads thoughts under another key than GIVEN."""
    return OTHER in read and GIVEN not in read


def _renamed(turn: dict[str, Any]) -> dict[str, Any]:
    return {OTHER if key == GIVEN else key: value for key, value in turn.items()}


def _in_channels(turn: dict[str, Any], is_past: bool) -> dict[str, Any]:
    """Return a turn without a thought that is past, and with its text in it if it makes calls."""
    if is_past:
        turn = {key: value for key, value in turn.items() if key != OTHER}
    if not turn.get("tool_calls"):
        return turn
    parts = (turn.get(OTHER), turn["content"])
    said = [part for part in parts if isinstance(part, str) and part.strip()]
    return turn | {OTHER: BETWEEN.join(said), "content": ""}
