"""The flags of benchmarks.serving, and the requests that they ask for."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arrivals import Arrival, Lengths, at_rate, capped, poisson, resized, stretched
from benchmarks.traces import read_trace
from jaxserve.client.flags import credential_flags, tls_of
from jaxserve.config import PRESETS
from jaxserve.errors import ConfigError

REQUESTS = 100  # of a Poisson process


def parser(description: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=description)
    _server_flags(p.add_argument_group("server"))
    _load_flags(p.add_argument_group("load"))
    p.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="objective for the time to the first token")
    p.add_argument("--slo-tpot-ms", type=float, metavar="MS", help="objective for the time per token after it")
    p.add_argument("--out", type=Path, metavar="FILE", help="JSON; the table goes beside it as .md, a picture as .svg")
    return p


def _server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--address", default="127.0.0.1:50051", metavar="HOST:PORT", help="of gRPC (%(default)s)")
    group.add_argument("--protocol", choices=("grpc", "openai"), default="grpc", help="of the requests (grpc)")
    group.add_argument("--url", default="http://127.0.0.1:8000", help="of --protocol openai (%(default)s)")
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="of a server that does not tell: another one than ours, or we are no admin",
    )
    group.add_argument(
        "--presets",
        nargs="?",
        const=",".join(PRESETS),
        metavar="P,P",
        help=f"start servers of our own, one after the other: --prefer each of these ({','.join(PRESETS)})",
    )
    group.add_argument("--ready-timeout", type=float, default=1800.0, metavar="S", help="for them to be ready (1800)")
    credential_flags(group)
    group.add_argument("serve_flags", nargs="*", metavar="FLAG", help="after --: more flags for them")


def _load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--rate", type=float, metavar="R", help="requests/s on average")
    group.add_argument("--rates", metavar="R,R", help="several, one after the other")
    group.add_argument("--requests", type=int, metavar="N", help=f"of each rate ({REQUESTS}; of a trace: all it has)")
    group.add_argument("--prompt-tokens", default="128", metavar="N|N-N", help="evenly spread from .. to (128)")
    group.add_argument("--output-tokens", default="64", metavar="N|N-N", help="the same (64)")
    group.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake's JSON lines or Azure's CSV instead")
    group.add_argument("--time-scale", type=float, metavar="X", help="of a trace: its gaps times this (1)")
    group.add_argument("--token-scale", type=float, default=1.0, metavar="X", help="of a trace: its lengths (1)")
    group.add_argument("--max-prompt-tokens", type=int, metavar="N", help="longer prompts are cut")
    group.add_argument("--max-output-tokens", type=int, metavar="N", help="longer answers are cut")
    group.add_argument("--warm-up", type=int, default=3, metavar="N", help="requests before, not counted (3)")
    group.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and tokens (0)")


def check(args: argparse.Namespace) -> None:
    """ConfigError for what no server is needed to refuse."""
    rates = rates_of(args)
    if not args.trace and rates == [None]:
        raise ConfigError("no load was asked for (give --rate, --rates or --trace)")
    if args.trace and args.time_scale is not None and rates != [None]:
        raise ConfigError("--time-scale and --rate both say how fast a trace comes (give one of them)")
    for name in ("time_scale", "token_scale", "slo_ttft_ms", "slo_tpot_ms", "ready_timeout"):
        _check_above(name, getattr(args, name), 0)
    for name in ("requests", "max_prompt_tokens", "max_output_tokens", "vocab_size"):
        _check_above(name, getattr(args, name), 0)
    _check_above("warm_up", args.warm_up, -1)
    _check_above("seed", args.seed, -1)
    if args.vocab_size and args.presets:
        raise ConfigError("--vocab-size is for a server that cannot be asked (leave it out, or --presets)")
    presets_of(args)
    if args.presets and tls_of(args):
        raise ConfigError("servers of our own are asked in plain text (leave the --tls flags out, or --presets)")
    if args.serve_flags and not args.presets:
        raise ConfigError(f"{args.serve_flags[0]!r} is for a server of our own (give --presets)")
    if args.out and not args.out.parent.is_dir():
        raise ConfigError(f"--out {args.out}: there is no folder {args.out.parent}")


def _check_above(name: str, value: float | None, low: int) -> None:
    if value is not None and not value > low:
        raise ConfigError(f"--{name.replace('_', '-')} {value:g}: it must be above {low}")


def rates_of(args: argparse.Namespace) -> list[float | None]:
    """Requests/s, one after the other; a single None is a trace at its own times."""
    if args.rate is not None and args.rates is not None:
        raise ConfigError("--rate and --rates: give one of them")
    if args.rates is None:
        return [args.rate]
    try:
        return [float(rate) for rate in args.rates.split(",")]
    except ValueError:
        raise ConfigError(f"--rates {args.rates!r} is not a list like 1,2,4") from None


def presets_of(args: argparse.Namespace) -> list[str]:
    """None of them: a server that is there already."""
    names = args.presets.split(",") if args.presets else []
    for name in names:
        if name not in PRESETS:
            raise ConfigError(f"--presets {name!r}: choose of {','.join(PRESETS)}")
    return names


def arrivals_of(args: argparse.Namespace) -> tuple[list[list[Arrival]], int]:
    """The arrivals of each rate, and how many of each were capped."""
    plans, count = [], 0
    trace = resized(read_trace(args.trace, args.requests), args.token_scale) if args.trace else None
    for rate in rates_of(args):
        plan, count = capped(_at(args, trace, rate), args.max_prompt_tokens, args.max_output_tokens)
        plans.append(plan)
    return plans, count


def _at(args: argparse.Namespace, trace: Sequence[Arrival] | None, rate: float | None) -> Sequence[Arrival]:
    if trace is None:
        assert rate is not None  # or `check` refuses
        prompt, output = Lengths.parse(args.prompt_tokens), Lengths.parse(args.output_tokens)
        return poisson(rate, args.requests or REQUESTS, prompt, output, args.seed)
    return stretched(trace, args.time_scale or 1.0) if rate is None else at_rate(trace, rate)
