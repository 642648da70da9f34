"""Flags of the four benchmarks."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxserve.checkpoints.hub.names import HubModel, model_of_flag
from jaxserve.cli.field_flags import add_flags, options_from
from jaxserve.cli.flags import BUNDLED, EngineFlags, model_option
from jaxserve.cli.parser import Parser
from jaxserve.client.flags import CredentialOptions
from jaxserve.config.option import option, options, required

PROGRAM = "jaxserve bench"
OUTPUTS = ("md", "csv", "json")
PROCESSES = ("poisson", "constant", "gamma")


def repetitions(default: int) -> int:
    """Declare the option --repetitions."""
    return option(
        default, f"number of times that everything is measured (default: {default})", metavar="N"
    )


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of every benchmark."""

    words: tuple[str, ...] = ()  # the command line, without the program
    output: str = option(
        "md", "format of the results on standard output (default: md)", choices=OUTPUTS
    )

    @property
    def command_line(self) -> str:
        """The command line as one types it."""
        return shlex.join([*PROGRAM.split(), *self.words])


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The server that is measured."""

    target: str | None = option(
        None,
        "server to measure: grpc://HOST:PORT of jaxserve, or http://HOST:PORT/v1 of any server "
        "with OpenAI's API (default: start a jaxserve for the run)",
        metavar="URL",
    )
    model: Path | HubModel | None = option(
        None,
        f"folder or name of the model for a server that is started (default: {BUNDLED.name}, "
        f"bundled)",
        metavar="MODEL",
        parse=model_of_flag,
    )
    serve_flags: Sequence[str] = required(
        "after --: more flags for a server that is started",
        metavar="FLAG",
        names=("serve_flags",),
        nargs="*",
    )
    ready_timeout: float = option(
        1800.0, "seconds that the server gets to become ready (default: 1800)", metavar="S"
    )
    served_model_name: str | None = option(
        None,
        "name of the model to ask for over OpenAI's API (default: the first one offered)",
        metavar="NAME",
    )
    tokenizer: Path | None = option(
        None, "folder with the server's tokenizer, to count and make tokens", metavar="DIR"
    )
    vocab_size: int | None = option(
        None,
        "size of the vocabulary, where neither the server nor a tokenizer tells it",
        metavar="N",
    )
    strict: bool = option(
        False,
        "send only what OpenAI's own API knows; answers may then end early, and tokens are counted "
        "by chunks",
    )
    credentials: CredentialOptions = options(CredentialOptions)


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Requests that are sent."""

    prompt_tokens: str = option(
        "128",
        "tokens of a prompt, which are random: N, or spread evenly over N-N (default: 128)",
        metavar="N|N-N",
    )
    output_tokens: str = option(
        "64", "tokens of an answer: N, or spread evenly over N-N (default: 64)", metavar="N|N-N"
    )
    prompts_file: Path | None = option(
        None,
        "file of prompts to send instead of random tokens, one per line, over and over",
        metavar="F",
    )
    trace: Path | None = option(
        None, "file of lengths and times to replay: Mooncake's JSONL or Azure's CSV", metavar="F"
    )
    time_scale: float | None = option(
        None, "factor on the gaps of a trace (default: 1)", metavar="X"
    )
    token_scale: float = option(1.0, "factor on the lengths in a trace (default: 1)", metavar="X")
    max_prompt_tokens: int | None = option(
        None, "length in tokens to which longer prompts are cut (default: no limit)", metavar="N"
    )
    max_output_tokens: int | None = option(
        None, "length in tokens to which longer answers are cut (default: no limit)", metavar="N"
    )
    ignore_eos: bool = option(
        True, "let the model end its answers (default: they have all of --output-tokens)"
    )
    timeout: float = option(
        600.0, "seconds after which a request counts as failed (default: 600)", metavar="S"
    )
    seed: int = option(0, "seed of arrivals, lengths and tokens (default: 0)")


@dataclass(frozen=True, kw_only=True)
class PaceOptions:
    """Times at which requests are sent."""

    rate: str | None = option(
        None,
        "requests per second on average, in an open loop; inf sends all at once",
        metavar="R,R",
    )
    concurrency: str | None = option(
        None, "requests in flight at a time, in a closed loop", metavar="N,N"
    )
    arrivals: str = option(
        "poisson", "process of the arrivals in an open loop (default: poisson)", choices=PROCESSES
    )
    burstiness: float | None = option(
        None, "shape of the gaps for --arrivals gamma: 1 is Poisson, less is burstier", metavar="K"
    )
    requests: int | None = option(
        None, "requests of each run (default: 100, or the whole trace)", metavar="N"
    )
    duration: float | None = option(
        None, "stop sending after S seconds instead of counting requests", metavar="S"
    )
    warm_up: int = option(
        3, "requests that are sent before each run and not counted (default: 3)", metavar="N"
    )


@dataclass(frozen=True, kw_only=True)
class ServerBenchOptions(BenchOptions):
    """Options of every benchmark of a server."""

    server: TargetOptions = options(TargetOptions, "server")
    requests: RequestOptions = options(RequestOptions, "requests")


@dataclass(frozen=True, kw_only=True)
class BenchServeOptions(ServerBenchOptions):
    """Options of `jaxserve bench serve`."""

    repetitions: int = repetitions(1)
    pace: PaceOptions = options(PaceOptions, "pace")
    slo: str | None = option(
        None,
        "objectives of goodput in ms, any of ttft, tpot and e2e, such as ttft=500,tpot=50",
        metavar="N=MS,..",
    )


@dataclass(frozen=True, kw_only=True)
class OverloadOptions(ServerBenchOptions):
    """Options of `jaxserve bench overload`."""

    loads: str = option(
        "0.6,1,2,4",
        "offered loads, in multiples of the server's capacity (default: 0.6,1,2,4)",
        metavar="X,X",
    )
    deadlines: str = option(
        "2",
        "seconds that requests give the server, in turn (default: 2)",
        metavar="S,S",
    )
    clients: int | None = option(
        None,
        "requests in flight while the capacity is measured (default: the server's rows over the "
        "choices of a request)",
        metavar="N",
    )
    choices: int = option(1, "answers to each prompt (default: 1)", metavar="N")
    duration: float = option(15.0, "seconds of each load (default: 15)", metavar="S")
    plot: Path | None = option(
        None, "file for a chart of goodput against offered load, as SVG", metavar="F"
    )


@dataclass(frozen=True, kw_only=True)
class OfflineOptions(BenchOptions):
    """Options of `jaxserve bench offline`."""

    repetitions: int = repetitions(5)
    model: Path | HubModel = model_option()
    prompt_tokens: str = option(
        "128", "prompt tokens of pp and pp+tg; 0 leaves both out (default: 128)", metavar="N,N"
    )
    output_tokens: str = option(
        "64", "generated tokens of tg and pp+tg; 0 leaves both out (default: 64)", metavar="N,N"
    )
    batch: str = option("1", "sequences that run together (default: 1)", metavar="N,N")
    seed: int = option(0, "seed of the prompts' tokens (default: 0)")
    engine: EngineFlags = options(EngineFlags, "engine")


@dataclass(frozen=True, kw_only=True)
class StartupOptions(BenchOptions):
    """Options of `jaxserve bench startup`."""

    repetitions: int = repetitions(3)
    model: Path | HubModel = model_option()
    engine: EngineFlags = options(EngineFlags, "engine")


# Name of a benchmark -> its options, and what it does.
COMMANDS: dict[str, tuple[type[BenchOptions], str]] = {
    "serve": (
        BenchServeOptions,
        "measure latency, throughput and goodput of a server under load, at the client",
    ),
    "overload": (
        OverloadOptions,
        "measure goodput of a server at and beyond its capacity, of requests with deadlines",
    ),
    "offline": (
        OfflineOptions,
        "measure tokens per second of prompts, of generation, and of both, without a server",
    ),
    "startup": (
        StartupOptions,
        "measure seconds until the first token, stage by stage, each start in a fresh process",
    ),
}


def parser() -> Parser:
    """Return the parser of the program."""
    p = Parser(
        prog=PROGRAM,
        description="Measure speed on this machine, or of a server. Tables on standard output.",
    )
    commands = p.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, (kind, what) in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
        add_flags(command, kind)
    return p


def parse(arguments: Sequence[str] | None = None) -> Any:
    """Return the options of a command line, by default that of this process; see COMMANDS."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    args = parser().parse_args(words)
    kind, _ = COMMANDS[args.command]
    return replace(options_from(kind, args), words=tuple(words))
