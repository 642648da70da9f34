"""Entry point of `jaxserve convert`: reads and checks its arguments, without jax."""

from jaxserve.sigint import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()  # before the imports that take seconds

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.backends import importing_jax
from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hub.names import HubModel, model_of_flag
from jaxserve.checkpoints.new_folder import check_target
from jaxserve.cli.checks import found_model
from jaxserve.cli.exits import exit_code
from jaxserve.cli.field_flags import add_flags, options_from
from jaxserve.cli.parser import Parser
from jaxserve.config.option import option, required
from jaxserve.flag_errors import flag_text
from jaxserve.models.precision import AS_STORED, check_form

DESCRIPTION = """\
Convert a Hugging Face folder to an Orbax folder, or back with --to hf. With --weights the Orbax
folder holds quantized weights; then SRC may also be an Orbax folder in full precision. DST is
written under another name beside it and renamed at the end.
"""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of `jaxserve convert`."""

    source: Path | HubModel = required(
        "the folder to convert, or org/name[@revision] of the hub",
        metavar="SRC",
        names=("source",),
        parse=model_of_flag,
    )
    target: Path = required(
        "the folder to write, which must not exist yet", metavar="DST", names=("target",)
    )
    to: str = option("orbax", "the layout of DST (default: orbax)", choices=("orbax", "hf"))
    weights: str = option(
        AS_STORED,
        "how an Orbax folder holds weights: auto (as SRC has them), int8, fp8, int4, or int4 in "
        "groups (int4-g32, ...); the suffix +head quantizes the head too (default: auto)",
        metavar="FORM",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 0, or 2 with one line on standard error."""
    options = options_from(ConvertOptions, parser().parse_args(arguments))
    return exit_code(lambda: run(options))


def parser() -> Parser:
    """Return the parser of `jaxserve convert`."""
    p = Parser(prog="jaxserve convert", description=DESCRIPTION)
    add_flags(p, ConvertOptions)
    return p


def run(options: ConvertOptions) -> int:
    """Check the options, then import jax and convert; return the exit code."""
    if options.to == "hf" and not isinstance(options.source, Path):
        raise CheckpointError(f"{options.source}: models of the hub are in that layout (--to hf)")
    check_target(options.target)
    check_form(options.weights)
    if options.to == "hf" and options.weights != AS_STORED:
        problem = "--to hf writes no quantized weights (leave it out)"
        raise CheckpointError(flag_text("--weights", options.weights, problem))
    source = found_model(options.source)
    with importing_jax():
        from jaxserve.loading.convert import convert

    convert(source, options.target, options.to, options.weights)
    return 0


if __name__ == "__main__":
    sys.exit(main())
