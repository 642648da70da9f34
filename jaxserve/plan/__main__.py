"""Entry point of `jaxserve plan`: reads and checks its arguments, without jax."""

from jaxserve.sigint import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()  # before the imports that take seconds

import argparse
import sys
from collections.abc import Sequence

from jaxserve.backends import importing_jax
from jaxserve.cli.exits import exit_code
from jaxserve.cli.flags import engine_options
from jaxserve.cli.output import prepare_output
from jaxserve.config import check_options
from jaxserve.plan.flags import check, check_topology, parser
from jaxserve.plan.model_config import pinned, read_config
from jaxserve.plan.topology import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code.

    0 if the model fits, 1 if it does not, 2 if something asked for cannot be done.
    """
    args = parser().parse_args(arguments)
    prepare_output(args.json)
    return exit_code(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Check the arguments, then import jax and plan; return the exit code."""
    check(args)
    topology = parse(args.topology)
    check_topology(args, topology)
    args.model = pinned(args.model)
    model = read_config(args.model)
    check_options(engine_options(args))
    with importing_jax():
        from jaxserve.plan.program import plan

    return plan(args, topology, model)


if __name__ == "__main__":
    sys.exit(main())
