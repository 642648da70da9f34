"""Flags of the three benchmarks."""

import argparse
from pathlib import Path

from jaxserve.checkpoints.hub.names import model_of_flag
from jaxserve.cli.flags import BUNDLED, engine_flags, model_flag
from jaxserve.cli.parser import Parser
from jaxserve.client.flags import credential_flags

PROGRAM = "jaxserve bench"
OUTPUTS = ("md", "csv", "json")
PROCESSES = ("poisson", "constant", "gamma")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program."""
    p = Parser(
        prog=PROGRAM,
        description="Measure speed on this machine, or of a server. Tables on standard output.",
    )
    commands = p.add_subparsers(dest="command", required=True, metavar="serve|offline|startup")
    for name, what, flags in (
        (
            "serve",
            "measure latency, throughput and goodput of a server under load, at the client",
            _serve_flags,
        ),
        (
            "offline",
            "measure tokens per second of prompts, of generation, and of both, without a server",
            _offline_flags,
        ),
        (
            "startup",
            "measure seconds until the first token, stage by stage, each start in a fresh process",
            _startup_flags,
        ),
    ):
        command = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
        command.add_argument(
            "--output",
            choices=OUTPUTS,
            default="md",
            help="format of the results on standard output (default: md)",
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
        help="objectives of goodput in ms, any of ttft, tpot and e2e, such as ttft=500,tpot=50",
    )


def _target_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--target",
        metavar="URL",
        help="server to measure: grpc://HOST:PORT of jaxserve, or http://HOST:PORT/v1 of any "
        "server with OpenAI's API (default: start a jaxserve for the run)",
    )
    group.add_argument(
        "--model",
        type=model_of_flag,
        metavar="MODEL",
        help="folder or name of the model for a server that is started (default: "
        f"{BUNDLED.name}, bundled)",
    )
    group.add_argument(
        "serve_flags",
        nargs="*",
        metavar="FLAG",
        help="after --: more flags for a server that is started",
    )
    group.add_argument(
        "--ready-timeout",
        type=float,
        default=1800.0,
        metavar="S",
        help="seconds that the server gets to become ready (default: 1800)",
    )
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="name of the model to ask for over OpenAI's API (default: the first one offered)",
    )
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder with the server's tokenizer, to count and make tokens",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="size of the vocabulary, where neither the server nor a tokenizer tells it",
    )
    group.add_argument(
        "--strict",
        action="store_true",
        help="send only what OpenAI's own API knows; answers may then end early, and tokens are "
        "counted by chunks",
    )
    credential_flags(group)


def _request_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompt-tokens",
        default="128",
        metavar="N|N-N",
        help="tokens of a prompt, which are random: N, or spread evenly over N-N (default: 128)",
    )
    group.add_argument(
        "--output-tokens",
        default="64",
        metavar="N|N-N",
        help="tokens of an answer: N, or spread evenly over N-N (default: 64)",
    )
    group.add_argument(
        "--prompts-file",
        type=Path,
        metavar="F",
        help="file of prompts to send instead of random tokens, one per line, over and over",
    )
    _trace_flags(group)
    group.add_argument(
        "--max-prompt-tokens",
        type=int,
        metavar="N",
        help="length in tokens to which longer prompts are cut (default: no limit)",
    )
    group.add_argument(
        "--max-output-tokens",
        type=int,
        metavar="N",
        help="length in tokens to which longer answers are cut (default: no limit)",
    )
    group.add_argument(
        "--no-ignore-eos",
        action="store_true",
        help="let the model end its answers (default: they have all of --output-tokens)",
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds after which a request counts as failed (default: 600)",
    )
    group.add_argument(
        "--seed", type=int, default=0, help="seed of arrivals, lengths and tokens (default: 0)"
    )


def _trace_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace",
        type=Path,
        metavar="F",
        help="file of lengths and times to replay: Mooncake's JSONL or Azure's CSV",
    )
    group.add_argument(
        "--time-scale", type=float, metavar="X", help="factor on the gaps of a trace (default: 1)"
    )
    group.add_argument(
        "--token-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="factor on the lengths in a trace (default: 1)",
    )


def _pace_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rate",
        metavar="R,R",
        help="requests per second on average, in an open loop; inf sends all at once",
    )
    group.add_argument(
        "--concurrency", metavar="N,N", help="requests in flight at a time, in a closed loop"
    )
    group.add_argument(
        "--arrivals",
        choices=PROCESSES,
        default="poisson",
        help="process of the arrivals in an open loop (default: poisson)",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        metavar="K",
        help="shape of the gaps for --arrivals gamma: 1 is Poisson, less is burstier",
    )
    group.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="requests of each run (default: 100, or the whole trace)",
    )
    group.add_argument(
        "--duration",
        type=float,
        metavar="S",
        help="stop sending after S seconds instead of counting requests",
    )
    group.add_argument(
        "--warm-up",
        type=int,
        default=3,
        metavar="N",
        help="requests that are sent before each run and not counted (default: 3)",
    )


def _offline_flags(p: argparse.ArgumentParser) -> None:
    _repetitions(p, 5)
    model_flag(p)
    p.add_argument(
        "--prompt-tokens",
        default="128",
        metavar="N,N",
        help="prompt tokens of pp and pp+tg; 0 leaves both out (default: 128)",
    )
    p.add_argument(
        "--output-tokens",
        default="64",
        metavar="N,N",
        help="generated tokens of tg and pp+tg; 0 leaves both out (default: 64)",
    )
    p.add_argument(
        "--batch", default="1", metavar="N,N", help="sequences that run together (default: 1)"
    )
    p.add_argument("--seed", type=int, default=0, help="seed of the prompts' tokens (default: 0)")
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
        help=f"number of times that everything is measured (default: {default})",
    )
