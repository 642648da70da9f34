"""Entry point of `jaxserve bench serve | offline | startup`."""

from jaxserve.sigint import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()  # before the imports that take seconds

import argparse
import shlex
import sys
from collections.abc import Sequence

from jaxserve.backends import importing_jax
from jaxserve.bench.flags import PROGRAM, parser
from jaxserve.cli.checks import resolve_models
from jaxserve.cli.exits import exit_code
from jaxserve.cli.output import prepare_output


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark and return its exit code.

    0; 1 if a server answered no request; 2, with one line on standard error, if something asked for
    cannot be done; 130 after Ctrl-C, when what was measured so far has been printed.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    args = parser().parse_args(words)
    args.asked = words
    args.command_line = shlex.join([*PROGRAM.split(), *words])
    prepare_output(as_json=args.output == "json")
    return exit_code(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Run a benchmark. Only offline imports jax, which takes a device's memory."""
    if args.command == "serve":
        from jaxserve.bench.serve import bench_serve

        return bench_serve(args)
    resolve_models(args)
    if args.command == "startup":
        from jaxserve.bench.startup import bench_startup

        return bench_startup(args)
    with importing_jax():
        from jaxserve.bench.offline import bench_offline

    return bench_offline(args)


if __name__ == "__main__":
    sys.exit(main())
