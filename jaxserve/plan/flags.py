"""Flags of `jaxserve plan`, and the check of their combinations."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from jaxserve.cli.checks import check_new_file
from jaxserve.cli.flags import model_argument, size_flags
from jaxserve.cli.parser import Parser
from jaxserve.config.option import flag_of
from jaxserve.errors import ConfigError, flag_text
from jaxserve.models.precision import DTYPE_NAMES, check_form
from jaxserve.plan.model_config import shipped
from jaxserve.plan.topology import Topology

DEFAULT_CONTEXT = 2048
# Share of a GPU's memory that jax takes, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
MEMORY_FRACTION = 0.75
MAX_INT32 = 2**31 - 1


def parser() -> argparse.ArgumentParser:
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
    p.add_argument("--model", metavar="MODEL", help="another way to give MODEL")
    p.add_argument(
        "--topology",
        required=True,
        metavar="T",
        help="devices to plan for, such as v5e:4x4, v6e:2x4, v5p:2x2x2, 7x:2x2x1, h200x8 or cpu",
    )
    _mesh_flags(p.add_argument_group("mesh"))
    _number_flags(p.add_argument_group("weights, context and cost"))
    _output_flags(p.add_argument_group("compilation and output"))
    size_flags(p.add_argument_group("engine"))
    return p


def _mesh_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data",
        type=_count,
        metavar="N",
        help="data axis of the mesh: data-parallel lanes (default: 1)",
    )
    group.add_argument(
        "--expert",
        type=_count,
        metavar="N",
        help="expert axis of the mesh: devices that share the experts, or lanes of a model without "
        "experts (default: 1)",
    )
    group.add_argument(
        "--tensor",
        type=_count,
        metavar="N",
        help="tensor axis of the mesh: devices that share each layer (default: all that are left)",
    )


def _number_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--weights",
        default="auto",
        metavar="FORM",
        help="format of the weights in memory: auto (as stored), float32, bfloat16, int8, fp8, "
        "int4, or int4 in groups: int4-g32, int4-g64, int4-g128; w8a8-int8 and w8a8-fp8 quantize "
        "activations too; a +head at the end quantizes the head as well (default: auto)",
    )
    group.add_argument(
        "--context",
        type=_count,
        metavar="N",
        help=f"length in tokens for which times are given: of prompts, and of sequences that "
        f"decode (default: {DEFAULT_CONTEXT}, or the engine's context if that is less)",
    )
    group.add_argument(
        "--price",
        type=_positive,
        metavar="USD",
        help="price of one chip for an hour, in USD; adds the price of a million tokens",
    )
    group.add_argument(
        "--link",
        type=_positive,
        metavar="GB/S",
        help="rate of the network between a prefill and a decode server, in 10^9 bytes/s; adds the "
        "cost of sending a prompt's pages and the prompt length from which it pays, and plans the "
        "steps and memory of servers that exchange pages",
    )
    group.add_argument(
        "--memory-fraction",
        type=_fraction,
        metavar="X",
        help=f"share of a GPU's memory that the server may use, its XLA_PYTHON_CLIENT_MEM_FRACTION "
        f"(default: {MEMORY_FRACTION})",
    )


def _output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object, and nothing else on standard output",
    )
    group.add_argument(
        "--suggest",
        type=_number,
        nargs="?",
        const=3,
        metavar="N",
        help="rank all meshes: estimate all of them, then compile the best N (default: 3); "
        "--prefer latency ranks by the time of a lone stream, otherwise tokens per second decide",
    )
    group.add_argument(
        "--allow-quantized",
        action="store_true",
        default=None,
        help="with --suggest, also rank formats that round: bfloat16, int8 and int4-g128 where "
        "--weights is auto, and pages in int8 where --kv is auto",
    )
    group.add_argument(
        "--all",
        action="store_true",
        default=None,
        help="with --suggest, show all rows, not the best eight",
    )
    group.add_argument(
        "--plot",
        type=Path,
        metavar="F",
        help="file to write charts of times and rates by batch to, as SVG",
    )
    group.add_argument(
        "--html",
        type=Path,
        metavar="F",
        help="file to write a page to, with the memory of a device, each step on its roofline, and "
        "the charts of --plot",
    )
    group.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder to keep the compiled steps in, for serve --bundle (TPUs, and the CPU to try "
        "it out)",
    )
    group.add_argument(
        "--buckets",
        choices=("all", "largest"),
        help="steps to compile: all, or largest, only the widest of each kind and the narrowest "
        "decode (default: all)",
    )
    group.add_argument(
        "--no-compile",
        action="store_true",
        help="print only what can be counted, which needs no compiler and takes a second",
    )


def check_topology(args: argparse.Namespace, topology: Topology) -> None:
    """Raise ConfigError for what could not be done in the end, before anything is compiled."""
    if args.out and not topology.serializes:
        raise ConfigError(
            flag_text(
                "--out",
                args.out,
                f"what is compiled for an absent {args.topology} is not tuned for it (leave it "
                f"out)",
            )
        )
    for flag in ("plot", "html"):
        check_new_file(f"--{flag}", getattr(args, flag))
    for flag in ("plot", "html", "suggest", "link"):
        if getattr(args, flag) is not None and topology.limits is None:
            raise ConfigError(
                f"--{flag} needs the speed of {topology.name}, which is not published (leave it "
                f"out)"
            )


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that have no part in what is asked for."""
    if args.model is None:
        raise ConfigError(
            "the model is missing: give a folder, org/name of the hub, or one of "
            f"{', '.join(shipped())}"
        )
    if args.weights not in DTYPE_NAMES:
        check_form(args.weights)
    if args.suggest is None:
        for name in ("allow_quantized", "all"):
            if getattr(args, name):
                raise ConfigError(f"{flag_of(name)} is for --suggest (add it)")
    unused: dict[str, Sequence[str]] = {
        "--suggest": ("data", "expert", "tensor", "plot", "html", "buckets", "out", "link"),
        "--no-compile": ("buckets", "out"),
    }
    for flag, others in unused.items():
        given = getattr(args, flag[2:].replace("-", "_"))
        if given is None or given is False:  # 0 is a number that was given
            continue
        for name in others:
            if getattr(args, name) is not None:
                raise ConfigError(f"{flag} has no use for --{name} (leave --{name} out)")
    if args.speculate == "draft":
        raise ConfigError(
            flag_text(
                "--speculate",
                "draft",
                "a draft model's weights, pages and steps are not planned (leave it out)",
            )
        )
    if args.out and args.buckets == "largest":
        raise ConfigError(
            "--out keeps every step; --buckets largest compiles a few (leave --buckets out)"
        )


def _count(text: str) -> int:
    return _number(text, least=1)


def _number(text: str, least: int = 0) -> int:
    if not (text.isascii() and text.isdigit() and least <= int(text) <= MAX_INT32):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number from {least} to {MAX_INT32}"
        )
    return int(text)


def _positive(text: str) -> float:
    return _between(text, 0, math.inf)


def _fraction(text: str) -> float:
    return _between(text, 0, 1)


def _between(text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (low < value <= high and math.isfinite(value)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a finite number above {low:g}" + (" up to 1" if high == 1 else "")
        )
    return value
