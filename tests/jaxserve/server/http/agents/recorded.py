"""Requests that agents were seen to send, with texts of the recorded lengths filled in."""

import json
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

LENGTH = re.compile(r"<text of (\d+) characters>")
WORDS = "the quick brown fox jumps over the lazy dog and "


def recordings(start: str, slow: Collection[str] = ()) -> list[Any]:
    """Return the recordings whose names begin so, as parameters of a test that skips without.

    Those of the names in `slow` are marked so.
    """
    folder = os.environ.get("JAXSERVE_TEST_DATA")
    if folder is None:
        return [pytest.param({}, marks=pytest.mark.skip(reason="JAXSERVE_TEST_DATA is not set"))]
    files = sorted(Path(folder, "agents").glob(f"{start}*.json"))
    assert files
    return [
        pytest.param(
            json.loads(file.read_text()),
            marks=[pytest.mark.slow] if file.stem in slow else [],
            id=file.stem,
        )
        for file in files
    ]


def filled(value: Any, key: str = "") -> Any:
    """Return a body with a text in place of each length; arguments of calls are JSON texts."""
    if isinstance(value, dict):
        return {name: filled(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner) for inner in value]
    if not (isinstance(value, str) and (found := LENGTH.fullmatch(value))):
        return value
    length = int(found[1])
    if key == "arguments":
        empty = len(json.dumps({"cmd": ""}))
        return json.dumps({"cmd": text(length - empty)})
    return text(length)


def text(length: int) -> str:
    """Return a text of so many characters."""
    return (WORDS * (length // len(WORDS) + 1))[:length]
