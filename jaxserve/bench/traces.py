"""Arrivals of real services, read from published traces.

- Mooncake (FAST 2025): a JSON object a line with timestamp (ms), input_length, output_length
  (tokens) and hash_ids, a number for each block of 512 tokens of the prompt; equal numbers are
  equal prefixes.
- Azure (2023, 2024): CSV with TIMESTAMP, ContextTokens and GeneratedTokens.
"""

import csv
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from jaxserve.bench.arrivals import Arrival
from jaxserve.flag_errors import flag_error

BLOCK = 512  # tokens
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_trace(path: Path, requests: int | None) -> list[Arrival]:
    """Return the arrivals of a trace by time, the first one at 0 seconds.

    Args:
        requests: Number of the file's first requests that are read; None reads all.

    Raises:
        ConfigError: The file cannot be read, or is in neither format.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            file.seek(0)
            arrivals = list(islice(_format(path, first)(path, file), requests))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise flag_error(
            "--trace", path, f"it cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if not arrivals:
        raise flag_error("--trace", path, "it has no requests")
    arrivals.sort(key=lambda a: a.due)
    began = arrivals[0].due
    return [replace(a, due=a.due - began) for a in arrivals]


def _format(path: Path, first: str) -> Callable[[Path, Iterable[str]], Iterable[Arrival]]:
    if first.startswith("{"):
        return _mooncake
    if set(AZURE) <= set(first.strip().split(",")):
        return _azure
    raise flag_error(
        "--trace",
        path,
        f"it begins with {first.strip()[:40]!r}, which is neither Mooncake's JSON lines nor "
        f"Azure's CSV with the columns {', '.join(AZURE)}",
    )


def _mooncake(path: Path, lines: Iterable[str]) -> Iterable[Arrival]:
    return (_row(path, number, _of_mooncake, line) for number, line in enumerate(lines, 1))


def _azure(path: Path, lines: Iterable[str]) -> Iterable[Arrival]:
    return (
        _row(path, number, _of_azure, row) for number, row in enumerate(csv.DictReader(lines), 2)
    )


def _row(path: Path, number: int, read: Callable[[Any], Arrival], row: Any) -> Arrival:
    try:
        arrival = read(row)
        if arrival.prompt_tokens < 1 or arrival.output_tokens < 1:
            raise ValueError("a length below 1")
        return arrival
    except (ValueError, KeyError, TypeError) as error:
        raise flag_error(
            "--trace", path, f"line {number} is no request ({type(error).__name__}: {error})"
        ) from None


def _of_mooncake(line: str) -> Arrival:
    row = json.loads(line)
    prompt = int(row["input_length"])
    blocks = tuple(map(int, row["hash_ids"]))
    if len(blocks) != -(-prompt // BLOCK):
        raise ValueError(f"{len(blocks)} hash_ids for {prompt} tokens in blocks of {BLOCK}")
    return Arrival(row["timestamp"] / 1e3, prompt, int(row["output_length"]), blocks, BLOCK)


def _of_azure(row: dict[str, str]) -> Arrival:
    at = datetime.fromisoformat(row["TIMESTAMP"])
    seconds = at.replace(tzinfo=at.tzinfo or UTC).timestamp()
    return Arrival(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
