"""Entry point of `jaxserve plan`: reads and checks its arguments, without jax."""

from jaxserve.sigint import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()  # before the imports that take seconds

import sys
from collections.abc import Sequence

from jaxserve.backends import importing_jax
from jaxserve.cli.exits import exit_code
from jaxserve.cli.output import prepare_output
from jaxserve.config import check_options
from jaxserve.plan.flags import PlanOptions, check, check_topology, model_of, parse, parser
from jaxserve.plan.model_config import pinned, read_config
from jaxserve.plan.topology import parse as parse_topology

__all__ = ["main", "parser"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code.

    0 if the model fits, 1 if it does not, 2 if something asked for cannot be done.
    """
    options = parse(arguments)
    prepare_output(options.output.json)
    return exit_code(lambda: run(options))


def run(options: PlanOptions) -> int:
    """Check the options, then import jax and plan; return the exit code."""
    given = model_of(options)
    check(options)
    topology = parse_topology(options.topology)
    check_topology(options, topology)
    model = pinned(given)
    described = read_config(model)
    check_options(options.engine)
    with importing_jax():
        from jaxserve.plan.program import plan

    return plan(options, topology, model, described)


if __name__ == "__main__":
    sys.exit(main())
