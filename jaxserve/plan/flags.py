"""Flags of `jaxserve plan`, and the check of their combinations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxserve.cli.checks import check_new_file
from jaxserve.cli.field_flags import add_flags, options_from
from jaxserve.cli.flags import model_argument
from jaxserve.cli.parser import Parser
from jaxserve.config import EngineOptions
from jaxserve.config.flag_values import count, finite, int32
from jaxserve.config.option import flag_of, given_options, option, options, required, values_of
from jaxserve.errors import ConfigError
from jaxserve.flag_errors import flag_error
from jaxserve.models.precision import DTYPE_NAMES, check_form
from jaxserve.plan.bundle_folder import check_free
from jaxserve.plan.model_config import shipped
from jaxserve.plan.topology import Topology

DEFAULT_CONTEXT = 2048
# Share of a GPU's memory that jax takes, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
MEMORY_FRACTION = 0.75


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """Sizes of the mesh's axes."""

    data: int | None = option(
        None, "data axis of the mesh: data-parallel lanes (default: 1)", metavar="N", parse=count
    )
    expert: int | None = option(
        None,
        "expert axis of the mesh: devices that share the experts, or lanes of a model without "
        "experts (default: 1)",
        metavar="N",
        parse=count,
    )
    tensor: int | None = option(
        None,
        "tensor axis of the mesh: devices that share each layer (default: all that are left)",
        metavar="N",
        parse=count,
    )


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """Weights, lengths and prices that the estimate is for."""

    weights: str = option(
        "auto",
        "format of the weights in memory: auto (as stored), float32, bfloat16, int8, fp8, int4, or "
        "int4 in groups: int4-g32, int4-g64, int4-g128; w8a8-int8 and w8a8-fp8 quantize "
        "activations too; a +head at the end quantizes the head as well (default: auto)",
        metavar="FORM",
    )
    context: int | None = option(
        None,
        f"length in tokens for which times are given: of prompts, and of sequences that decode "
        f"(default: {DEFAULT_CONTEXT}, or the engine's context if that is less)",
        metavar="N",
        parse=count,
    )
    price: float | None = option(
        None,
        "price of one chip for an hour, in USD; adds the price of a million tokens",
        metavar="USD",
        parse=finite,
    )
    link: float | None = option(
        None,
        "rate of the network between a prefill and a decode server, in 10^9 bytes/s; adds the cost "
        "of sending a prompt's pages and the prompt length from which it pays, and plans the steps "
        "and memory of servers that exchange pages",
        metavar="GB/S",
        parse=finite,
    )
    memory_fraction: float | None = option(
        None,
        f"share of a GPU's memory that the server may use, its XLA_PYTHON_CLIENT_MEM_FRACTION "
        f"(default: {MEMORY_FRACTION})",
        metavar="X",
        parse=partial(finite, most=1),
    )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Steps that are compiled, and places of the results."""

    json: bool = option(False, "print one JSON object, and nothing else on standard output")
    suggest: int | None = option(
        None,
        "rank all meshes: estimate all of them, then compile the best N (default: 3); --prefer "
        "latency ranks by the time of a lone stream, otherwise tokens per second decide",
        metavar="N",
        parse=int32,
        nargs="?",
        const=3,
    )
    allow_quantized: bool = option(
        False,
        "with --suggest, also rank formats that round: bfloat16, int8 and int4-g128 where "
        "--weights is auto, and pages in int8 where --kv is auto",
    )
    all: bool = option(False, "with --suggest, show all rows, not the best eight")
    plot: Path | None = option(
        None, "file to write charts of times and rates by batch to, as SVG", metavar="F"
    )
    html: Path | None = option(
        None,
        "file to write a page to, with the memory of a device, each step on its roofline, and the "
        "charts of --plot",
        metavar="F",
    )
    out: Path | None = option(
        None,
        "folder to keep the compiled steps in, for serve --bundle (TPUs, and the CPU to try it "
        "out)",
        metavar="DIR",
    )
    buckets: str | None = option(
        None,
        "steps to compile: all, or largest, only the widest of each kind and the narrowest decode "
        "(default: all)",
        choices=("all", "largest"),
    )
    compile: bool = option(
        True, "print only what can be counted, which needs no compiler and takes a second"
    )


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `jaxserve plan`."""

    model: str | None = option(None, "another way to give MODEL", metavar="MODEL")
    topology: str = required(
        "devices to plan for, such as v5e:4x4, v6e:2x4, v5p:2x2x2, 7x:2x2x1, h200x8 or cpu",
        metavar="T",
        required=True,
    )
    mesh: MeshOptions = options(MeshOptions, "mesh")
    question: QuestionOptions = options(QuestionOptions, "weights, context and cost")
    output: OutputOptions = options(OutputOptions, "compilation and output")
    given: Mapping[str, Any] = given_options(EngineOptions, "engine")

    @property
    def engine(self) -> EngineOptions:
        """Options of the engine, with the defaults of those that are not given."""
        return EngineOptions(**self.given)


def parser() -> Parser:
    """Return the parser of the program."""
    p = Parser(
        prog="jaxserve plan",
        description="Estimate whether a model fits devices that are not here, and how fast it can "
        "be there at best. Exit code: 0 if it fits, 1 if it does not, 2 if something asked for "
        "cannot be done.",
    )
    models = (
        "folder of a checkpoint, a config.json, org/name[@revision] of the hub, or one of "
        f"{', '.join(shipped())}"
    )
    model_argument(p, models, kind=str, default=None)
    add_flags(p, PlanOptions)
    return p


def parse(arguments: Sequence[str] | None = None) -> PlanOptions:
    """Return the options of a command line, by default that of this process."""
    return options_from(PlanOptions, parser().parse_args(arguments))


def model_of(options: PlanOptions) -> str:
    """Return the model to plan for; ConfigError where none is given."""
    if options.model is None:
        raise ConfigError(
            "the model is missing: give a folder, org/name of the hub, or one of "
            f"{', '.join(shipped())}"
        )
    return options.model


def check_topology(options: PlanOptions, topology: Topology) -> None:
    """Raise ConfigError for what could not be done in the end, before anything is compiled."""
    output = options.output
    if output.out and not topology.serializes:
        raise flag_error(
            "--out",
            output.out,
            f"what is compiled for an absent {options.topology} is not tuned for it (leave it out)",
        )
    if output.out:
        check_free(output.out)
    check_new_file("--plot", output.plot)
    check_new_file("--html", output.html)
    values = values_of(options)
    for name in ("plot", "html", "suggest", "link"):
        if values[name] is not None and topology.limits is None:
            raise ConfigError(
                f"--{name} needs the speed of {topology.name}, which is not published (leave it "
                f"out)"
            )


def check(options: PlanOptions) -> None:
    """Raise ConfigError for flags that have no part in what is asked for."""
    weights = options.question.weights
    if weights not in DTYPE_NAMES:
        check_form(weights)
    output = options.output
    values = values_of(options)
    if output.suggest is None:
        for name in ("allow_quantized", "all"):
            if values[name]:
                raise ConfigError(f"{flag_of(name)} is for --suggest (add it)")
    unused: dict[str, Sequence[str]] = {}
    if output.suggest is not None:
        unused["--suggest"] = ("data", "expert", "tensor", "plot", "html", "buckets", "out", "link")
    if not output.compile:
        unused["--no-compile"] = ("buckets", "out")
    for flag, others in unused.items():
        for name in others:
            if values[name] is not None:
                raise ConfigError(f"{flag} has no use for --{name} (leave --{name} out)")
    if options.engine.speculate == "draft":
        raise flag_error(
            "--speculate",
            "draft",
            "a draft model's weights, pages and steps are not planned (leave it out)",
        )
    if output.out and output.buckets == "largest":
        raise ConfigError(
            "--out keeps every step; --buckets largest compiles a few (leave --buckets out)"
        )
