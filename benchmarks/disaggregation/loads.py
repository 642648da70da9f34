"""Requests that every arrangement gets: even short prompts, and long ones as in a trace."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxserve.bench.arrivals import Arrival, Lengths, Process, capped, drawn, due_times, resized
from jaxserve.bench.traces import read_trace

SEED = 0
SHORT_PROMPT = Lengths(32, 96)
SHORT_OUTPUT = Lengths(64, 64)
MOST_LONG_OUTPUT = 64
WARM_UP_REQUESTS = 4  # of each kind


@dataclass(frozen=True)
class Load:
    """A load of requests; rate: of long prompts, per second."""

    rate: float
    short: list[Arrival]
    long: list[Arrival]


def context_of(model: Path) -> int:
    """Return the longest context of a checkpoint, in tokens."""
    return json.loads((model / "config.json").read_text())["max_position_embeddings"]


def loads_of(args: argparse.Namespace, context: int) -> list[Load]:
    """Return a load for each rate."""
    trace = resized(read_trace(args.trace, None), args.token_scale)
    trace, _ = capped(trace, context - MOST_LONG_OUTPUT, MOST_LONG_OUTPUT)
    return [
        Load(
            rate,
            short_requests(args.short, args.seconds),
            long_requests(trace, rate, args.seconds),
        )
        for rate in args.rate
    ]


def short_requests(rate: float, seconds: float) -> list[Arrival]:
    """Return requests with short prompts at even times, `rate` of them a second."""
    due = due_times(Process("constant", rate).gaps(SEED), None, seconds)
    return drawn(due, SHORT_PROMPT, SHORT_OUTPUT, SEED)


def long_requests(trace: Sequence[Arrival], rate: float, seconds: float) -> list[Arrival]:
    """Return the first requests of the trace, at times of a Poisson process."""
    if not rate:
        return []
    due = due_times(Process("poisson", rate).gaps(SEED), None, seconds)
    return [replace(arrival, due=at) for arrival, at in zip(trace, due, strict=False)]


def warm_up(loads: Sequence[Load]) -> Load:
    """Return a load of a few requests of both kinds, all at once."""
    most = max(loads, key=lambda load: load.rate)
    return Load(most.rate, first_at_once(most.short), first_at_once(most.long))


def first_at_once(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Return the first few requests, all due at the beginning."""
    return [replace(arrival, due=0.0) for arrival in arrivals[:WARM_UP_REQUESTS]]
