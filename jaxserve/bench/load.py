"""Loads that the flags of bench serve ask for."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

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
from jaxserve.bench.flags import BenchServeOptions, PaceOptions, RequestOptions, TargetOptions
from jaxserve.bench.traces import read_trace
from jaxserve.errors import ConfigError
from jaxserve.flag_errors import flag_error

MAX_CONCURRENCY = 50_000  # a client has no more ports


@dataclass(frozen=True)
class Load:
    """Requests of one run."""

    arrivals: Sequence[Arrival]
    capped: int = 0  # requests that were cut to the longest allowed
    rate: float | None = None  # requests/s of an open loop; None for the rate of a trace
    concurrency: int | None = None  # requests in flight of a closed loop, otherwise None
    seconds: float | None = None  # nothing is sent after this time
    endless: bool = False  # a closed loop sends the arrivals over and over until `seconds`

    def __str__(self) -> str:
        if self.concurrency:
            return f"{self.concurrency} at a time"
        if self.rate is None:
            return "trace"
        return "at once" if self.rate == inf else f"{self.rate:g}/s"


def check(options: BenchServeOptions) -> None:
    """Raise ConfigError for options that are wrong whatever the server is."""
    check_above(options, 0, "time_scale", "token_scale", "ready_timeout", "duration")
    check_above(options, 0, "burstiness", "repetitions", "timeout", "requests")
    check_above(options, 0, "max_prompt_tokens", "max_output_tokens", "vocab_size")
    check_above(options, -1, "warm_up", "seed")
    _check_loop(options)
    check_target(options.server)


def _check_loop(options: BenchServeOptions) -> None:
    pace = options.pace
    requests = options.requests
    rates, concurrencies = paces(pace)
    if rates and concurrencies:
        raise ConfigError(
            "--rate is an open loop and --concurrency a closed one (give one of them)"
        )
    if not (rates or concurrencies or requests.trace):
        raise ConfigError("no load was asked for (give --rate, --concurrency or --trace)")
    if requests.trace and requests.prompts_file:
        raise ConfigError("--trace and --prompts-file both say what is sent (give one of them)")
    if requests.trace and requests.time_scale is not None and rates:
        raise ConfigError(
            "--time-scale and --rate both say how fast a trace comes (give one of them)"
        )
    if (pace.arrivals == "gamma") != (pace.burstiness is not None):
        raise ConfigError("--arrivals gamma and --burstiness need each other")
    seconds = pace.duration
    if seconds and pace.requests is None and any(rate * seconds > MOST for rate in rates):
        raise flag_error(
            "--duration", seconds, f"at these rates that is more than {MOST:,} requests (lower it)"
        )


def check_target(server: TargetOptions) -> None:
    if server.target:
        check_unused(server, ["model"], "is for a server of our own (leave it out, or --target)")
        if server.serve_flags:
            raise ConfigError(
                f"{server.serve_flags[0]!r} is for a server of our own (leave it out, or --target)"
            )
        return
    credentials = server.credentials
    if credentials.tls or credentials.token_file or server.served_model_name or server.strict:
        raise ConfigError(
            "--token-file, --tls-*, --served-model-name and --strict are for a server that is "
            "there (--target)"
        )


def paces(pace: PaceOptions) -> tuple[list[float], list[int]]:
    """Return the numbers of --rate and of --concurrency."""
    rates = numbers("rate", pace.rate, float, 0, inf)
    return rates, numbers("concurrency", pace.concurrency, int, 0, MAX_CONCURRENCY)


def loads_of(options: BenchServeOptions, repetition: int) -> list[Load]:
    """Return one load for each rate or concurrency.

    Each repetition draws other arrivals and lengths; a trace is always the same.
    """
    rates, concurrencies = paces(options.pace)
    seed = options.requests.seed + repetition
    closed = [_closed(options, concurrency, seed) for concurrency in concurrencies]
    return closed or [_open(options, rate, seed) for rate in rates or [None]]


def _open(options: BenchServeOptions, rate: float | None, seed: int) -> Load:
    pace = options.pace
    requests = options.requests
    if requests.trace:
        arrivals = _of_trace(requests.trace, options)
        if rate is None:
            arrivals = stretched(arrivals, requests.time_scale or 1.0)
        else:
            arrivals = at_rate(arrivals, rate)
        arrivals = [a for a in arrivals if pace.duration is None or a.due < pace.duration]
    else:
        assert rate is not None, "check refuses this"
        process = Process(pace.arrivals, rate, pace.burstiness or 1.0)
        due = due_times(process.gaps(seed), pace.requests, pace.duration)
        arrivals = drawn(due, *_lengths(requests), seed)
    return Load(*_capped(requests, arrivals), rate=rate, seconds=pace.duration)


def _closed(options: BenchServeOptions, concurrency: int, seed: int) -> Load:
    pace = options.pace
    requests = options.requests
    if requests.trace:
        arrivals = _of_trace(requests.trace, options)
    else:
        due = due_times(Process("constant", inf).gaps(seed), pace.requests, None)
        arrivals = drawn(due, *_lengths(requests), seed)
    sent = _capped(requests, arrivals)
    endless = pace.duration is not None and pace.requests is None
    return Load(*sent, concurrency=concurrency, seconds=pace.duration, endless=endless)


def _of_trace(file: Path, options: BenchServeOptions) -> list[Arrival]:
    return resized(read_trace(file, options.pace.requests), options.requests.token_scale)


def _lengths(requests: RequestOptions) -> tuple[Lengths | None, Lengths]:
    prompts = None if requests.prompts_file else Lengths.parse(requests.prompt_tokens)
    return prompts, Lengths.parse(requests.output_tokens)


def _capped(requests: RequestOptions, arrivals: Sequence[Arrival]) -> tuple[list[Arrival], int]:
    return capped(arrivals, requests.max_prompt_tokens, requests.max_output_tokens)
