"""The flags of the three benchmarks."""

import argparse
from pathlib import Path

from jaxserve.cli.flags import BUNDLED, engine_flags, model_flag
from jaxserve.client.flags import credential_flags

PROGRAM = "python -m jaxserve.bench"
OUTPUTS = ("md", "csv", "json")
PROCESSES = ("poisson", "constant", "gamma")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog=PROGRAM, description="How fast is it here? Tables on standard output."
    )
    commands = p.add_subparsers(dest="command", required=True, metavar="serve|offline|startup")
    for name, what, flags in (
        (
            "serve",
            "latency, throughput and goodput of a server under load, measured at the client",
            _serve_flags,
        ),
        (
            "offline",
            "tokens per second of prompts, of generation, and of both, without a server",
            _offline_flags,
        ),
        (
            "startup",
            "seconds until the first token, stage by stage, each start a fresh process",
            _startup_flags,
        ),
    ):
        command = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
        command.add_argument(
            "--output", choices=OUTPUTS, default="md", help="on standard output (md)"
        )
        flags(command)
    return p


def _serve_flags(p: argparse.ArgumentParser) -> None:
    _repetitions(p, 1)
    _target_flags(p.add_argument_group("server"))
    _request_flags(p.add_argument_group("requests"))
    _pace_flags(p.add_argument_group("pace"))
    p.add_argument(
        "--slo",
        metavar="N=MS,..",
        help="objectives in ms for goodput, of ttft, tpot, e2e: ttft=500,tpot=50",
    )


def _target_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--target",
        metavar="URL",
        help="grpc://HOST:PORT of jaxserve, http://HOST:PORT/v1 of any server with OpenAI's API; "
        "without it a server "
        "of our own is started",
    )
    group.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help=f"of our own server (default: {BUNDLED.name}, bundled)",
    )
    group.add_argument(
        "serve_flags", nargs="*", metavar="FLAG", help="after --: more flags for our own server"
    )
    group.add_argument(
        "--ready-timeout", type=float, default=1800.0, metavar="S", help="for it to be ready (1800)"
    )
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="of several that OpenAI's API offers (the first)",
    )
    group.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="folder with the server's tokenizer"
    )
    group.add_argument(
        "--vocab-size", type=int, metavar="N", help="instead, where the server does not tell"
    )
    group.add_argument(
        "--strict",
        action="store_true",
        help="send only what OpenAI's own API knows: answers may end early, and tokens are "
        "counted by chunks",
    )
    credential_flags(group)


def _request_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompt-tokens",
        default="128",
        metavar="N|N-N",
        help="random, evenly spread from .. to (128)",
    )
    group.add_argument("--output-tokens", default="64", metavar="N|N-N", help="the same (64)")
    group.add_argument(
        "--prompts-file",
        type=Path,
        metavar="F",
        help="texts instead, one per line, again and again",
    )
    group.add_argument(
        "--trace", type=Path, metavar="F", help="lengths and times: Mooncake's JSONL or Azure's CSV"
    )
    group.add_argument(
        "--time-scale", type=float, metavar="X", help="of a trace: its gaps times this (1)"
    )
    group.add_argument(
        "--token-scale", type=float, default=1.0, metavar="X", help="of a trace: its lengths (1)"
    )
    group.add_argument("--max-prompt-tokens", type=int, metavar="N", help="longer prompts are cut")
    group.add_argument("--max-output-tokens", type=int, metavar="N", help="longer answers are cut")
    group.add_argument(
        "--no-ignore-eos", action="store_true", help="answers end where the model ends them"
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="of one request, then it failed (600)",
    )
    group.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and tokens (0)")


def _pace_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rate", metavar="R,R", help="open loop: requests/s on average, inf: all at once"
    )
    group.add_argument("--concurrency", metavar="N,N", help="closed loop: so many at a time")
    group.add_argument(
        "--arrivals", choices=PROCESSES, default="poisson", help="of the open loop (poisson)"
    )
    group.add_argument(
        "--burstiness",
        type=float,
        metavar="K",
        help="of gamma: shape of the gaps; 1 is Poisson, below it is burstier",
    )
    group.add_argument(
        "--requests", type=int, metavar="N", help="of each run (100; of a trace: all it has)"
    )
    group.add_argument(
        "--duration", type=float, metavar="S", help="instead: nothing is sent after that"
    )
    group.add_argument(
        "--warm-up", type=int, default=3, metavar="N", help="requests before, not counted (3)"
    )


def _offline_flags(p: argparse.ArgumentParser) -> None:
    _repetitions(p, 5)
    model_flag(p)
    p.add_argument(
        "--prompt-tokens", default="128", metavar="N,N", help="of pp and pp+tg; 0: neither (128)"
    )
    p.add_argument(
        "--output-tokens", default="64", metavar="N,N", help="of tg and pp+tg; 0: neither (64)"
    )
    p.add_argument("--batch", default="1", metavar="N,N", help="sequences that run together (1)")
    p.add_argument("--seed", type=int, default=0, help="of the prompts' tokens (0)")
    engine_flags(p.add_argument_group("engine"))


def _startup_flags(p: argparse.ArgumentParser) -> None:
    _repetitions(p, 3)
    model_flag(p)
    engine_flags(p.add_argument_group("engine"))


def _repetitions(p: argparse.ArgumentParser, default: int) -> None:
    p.add_argument(
        "--repetitions",
        type=int,
        default=default,
        metavar="N",
        help=f"of each measurement ({default})",
    )
