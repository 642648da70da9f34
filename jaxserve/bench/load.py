"""Loads that the flags of bench serve ask for."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from jaxserve.bench.arrivals import (
    Arrival,
    Lengths,
    Process,
    at_rate,
    capped,
    drawn,
    due_times,
    resized,
    stretched,
)
from jaxserve.bench.checks import MOST, check_above, check_unused, numbers
from jaxserve.bench.traces import read_trace
from jaxserve.client.flags import tls_of
from jaxserve.errors import ConfigError, flag_text

MAX_CONCURRENCY = 50_000  # a client has no more ports


@dataclass(frozen=True)
class Load:
    """Requests of one run.

    capped: how many of them were cut to the longest allowed. rate: requests/s of an open loop; None
    for the rate of a trace. concurrency: requests in flight of a closed loop, otherwise None.
    seconds: nothing is sent after that. endless: a closed loop sends the arrivals over and over
    until then.
    """

    arrivals: Sequence[Arrival]
    capped: int = 0
    rate: float | None = None
    concurrency: int | None = None
    seconds: float | None = None
    endless: bool = False

    def __str__(self) -> str:
        if self.concurrency:
            return f"{self.concurrency} at a time"
        if self.rate is None:
            return "trace"
        return "at once" if self.rate == inf else f"{self.rate:g}/s"


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that are wrong whatever the server is."""
    check_above(
        args,
        0,
        "time_scale",
        "token_scale",
        "ready_timeout",
        "duration",
        "burstiness",
        "repetitions",
    )
    check_above(
        args, 0, "timeout", "requests", "max_prompt_tokens", "max_output_tokens", "vocab_size"
    )
    check_above(args, -1, "warm_up", "seed")
    _check_loop(args)
    _check_target(args)


def _check_loop(args: argparse.Namespace) -> None:
    rates, concurrencies = paces(args)
    if rates and concurrencies:
        raise ConfigError(
            "--rate is an open loop and --concurrency a closed one (give one of them)"
        )
    if not (rates or concurrencies or args.trace):
        raise ConfigError("no load was asked for (give --rate, --concurrency or --trace)")
    if args.trace and args.prompts_file:
        raise ConfigError("--trace and --prompts-file both say what is sent (give one of them)")
    if args.trace and args.time_scale is not None and rates:
        raise ConfigError(
            "--time-scale and --rate both say how fast a trace comes (give one of them)"
        )
    if (args.arrivals == "gamma") != (args.burstiness is not None):
        raise ConfigError("--arrivals gamma and --burstiness need each other")
    endless = args.duration and args.requests is None
    if endless and any(rate * args.duration > MOST for rate in rates):
        raise ConfigError(
            flag_text(
                "--duration",
                args.duration,
                f"at these rates that is more than {MOST:,} requests (lower it)",
            )
        )


def _check_target(args: argparse.Namespace) -> None:
    if args.target:
        check_unused(args, ["model"], "is for a server of our own (leave it out, or --target)")
        if args.serve_flags:
            raise ConfigError(
                f"{args.serve_flags[0]!r} is for a server of our own (leave it out, or --target)"
            )
    elif tls_of(args) or args.token_file or args.served_model_name or args.strict:
        raise ConfigError(
            "--token-file, --tls-*, --served-model-name and --strict are for a server that is "
            "there (--target)"
        )


def paces(args: argparse.Namespace) -> tuple[list[float], list[int]]:
    """Return the numbers of --rate and of --concurrency."""
    return numbers(args, "rate", float, 0, inf), numbers(
        args, "concurrency", int, 0, MAX_CONCURRENCY
    )


def loads_of(args: argparse.Namespace, repetition: int) -> list[Load]:
    """Return one load for each rate or concurrency.

    Each repetition draws other arrivals and lengths; a trace is always the same.
    """
    rates, concurrencies = paces(args)
    closed = [_closed(args, concurrency, args.seed + repetition) for concurrency in concurrencies]
    return closed or [_open(args, rate, args.seed + repetition) for rate in rates or [None]]


def _open(args: argparse.Namespace, rate: float | None, seed: int) -> Load:
    if args.trace:
        arrivals = _of_trace(args)
        if rate is None:
            arrivals = stretched(arrivals, args.time_scale or 1.0)
        else:
            arrivals = at_rate(arrivals, rate)
        arrivals = [a for a in arrivals if args.duration is None or a.due < args.duration]
    else:
        assert rate is not None, "check refuses this"
        process = Process(args.arrivals, rate, args.burstiness or 1.0)
        due = due_times(process.gaps(seed), args.requests, args.duration)
        arrivals = drawn(due, *_lengths(args), seed)
    return Load(*_capped(args, arrivals), rate=rate, seconds=args.duration)


def _closed(args: argparse.Namespace, concurrency: int, seed: int) -> Load:
    due = due_times(Process("constant", inf).gaps(seed), args.requests, None)
    arrivals = _of_trace(args) if args.trace else drawn(due, *_lengths(args), seed)
    endless = args.duration is not None and args.requests is None
    return Load(
        *_capped(args, arrivals), concurrency=concurrency, seconds=args.duration, endless=endless
    )


def _of_trace(args: argparse.Namespace) -> list[Arrival]:
    return resized(read_trace(args.trace, args.requests), args.token_scale)


def _lengths(args: argparse.Namespace) -> tuple[Lengths | None, Lengths]:
    prompts = None if args.prompts_file else Lengths.parse(args.prompt_tokens)
    return prompts, Lengths.parse(args.output_tokens)


def _capped(args: argparse.Namespace, arrivals: Sequence[Arrival]) -> tuple[list[Arrival], int]:
    return capped(arrivals, args.max_prompt_tokens, args.max_output_tokens)
