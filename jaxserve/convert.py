"""Entry point of `jaxserve convert`: reads and checks its arguments, without jax."""

from jaxserve.sigint import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()  # before the imports that take seconds

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxserve.backends import importing_jax
from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hub.names import model_of_flag
from jaxserve.checkpoints.new_folder import check_target
from jaxserve.cli.checks import found_model
from jaxserve.cli.exits import exit_code
from jaxserve.cli.parser import Parser
from jaxserve.errors import flag_text
from jaxserve.models.precision import AS_STORED, check_form

DESCRIPTION = """\
Convert a Hugging Face folder to an Orbax folder, or back with --to hf. With --weights the Orbax
folder holds quantized weights; then SRC may also be an Orbax folder in full precision. DST is
written under another name beside it and renamed at the end.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 0, or 2 with one line on standard error."""
    args = parser().parse_args(arguments)
    return exit_code(lambda: run(args))


def parser() -> argparse.ArgumentParser:
    """Return the parser of `jaxserve convert`."""
    p = Parser(prog="jaxserve convert", description=DESCRIPTION)
    p.add_argument(
        "source",
        metavar="SRC",
        type=model_of_flag,
        help="the folder to convert, or org/name[@revision] of the hub",
    )
    p.add_argument(
        "target", metavar="DST", type=Path, help="the folder to write, which must not exist yet"
    )
    p.add_argument(
        "--to", choices=("orbax", "hf"), default="orbax", help="the layout of DST (default: orbax)"
    )
    p.add_argument(
        "--weights",
        default=AS_STORED,
        metavar="FORM",
        help="how an Orbax folder holds weights: auto (as SRC has them), int8, fp8, int4, or int4 "
        "in groups (int4-g32, ...); the suffix +head quantizes the head too (default: auto)",
    )
    return p


def run(args: argparse.Namespace) -> int:
    """Check the arguments, then import jax and convert; return the exit code."""
    if args.to == "hf" and not isinstance(args.source, Path):
        raise CheckpointError(f"{args.source}: models of the hub are in that layout (--to hf)")
    check_target(args.target)
    check_form(args.weights)
    if args.to == "hf" and args.weights != AS_STORED:
        problem = "--to hf writes no quantized weights (leave it out)"
        raise CheckpointError(flag_text("--weights", args.weights, problem))
    source = found_model(args.source)
    with importing_jax():
        from jaxserve.loading.convert import convert

    convert(source, args.target, args.to, args.weights)
    return 0


if __name__ == "__main__":
    sys.exit(main())
