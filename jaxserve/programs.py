"""The programs that the command `jaxserve` starts by their names."""

import argparse
from collections.abc import Sequence
from importlib import import_module
from types import MappingProxyType

from jaxserve import __version__
from jaxserve.cli.parser import Parser

# Name of a program -> its module, which has the functions main and parser, and what it does.
PROGRAMS = MappingProxyType(
    {
        "generate": ("jaxserve.generate.__main__", "generate text, or chat, with a checkpoint"),
        "serve": ("jaxserve.serve", "serve a checkpoint over gRPC, and over HTTP as OpenAI's API"),
        "client": ("jaxserve.client.program", "ask a server for text"),
        "bench": ("jaxserve.bench.__main__", "measure speed on this machine, or of a server"),
        "plan": ("jaxserve.plan.__main__", "estimate whether a model fits devices, and its speed"),
        "convert": ("jaxserve.convert", "convert a checkpoint to Orbax and back, or quantize it"),
        "doctor": ("jaxserve.doctor.__main__", "look for faults of this machine and installation"),
    }
)


def start(arguments: Sequence[str]) -> int:
    """Run the program that the first argument names on the others; return its exit code."""
    name = arguments[0] if arguments else ""
    if name not in PROGRAMS:
        parser().parse_args(arguments)  # help, the version, or an error
        parser().error(f"{name} is no program")
    return import_module(PROGRAMS[name][0]).main(arguments[1:])


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own flags."""
    lines = [f"  {name:10}{what}" for name, (_, what) in PROGRAMS.items()]
    p = Parser(
        prog="jaxserve",
        usage="jaxserve PROGRAM ...",
        description="Inference of large language models on TPUs, GPUs and CPUs.",
        epilog="\n".join(["programs:", *lines, "", "jaxserve PROGRAM --help lists its flags"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "program", choices=tuple(PROGRAMS), metavar="PROGRAM", help="name of a program, see below"
    )
    p.add_argument("--version", action="version", version=f"jaxserve {__version__}")
    return p
