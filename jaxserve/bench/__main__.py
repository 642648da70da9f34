"""python -m jaxserve.bench serve | offline | startup: measure, and print tables."""

import shlex
import sys
from collections.abc import Sequence

from jaxserve.bench.flags import PROGRAM, parser
from jaxserve.cli.exits import exit_code
from jaxserve.cli.output import prepare_output
from jaxserve.errors import JaxserveError
from jaxserve.tokenizer import TokenizerError


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
    if args.command == "serve":
        from jaxserve.bench.serve import bench_serve

        return exit_code(lambda: bench_serve(args), (JaxserveError, TokenizerError))
    if args.command == "startup":
        from jaxserve.bench.startup import bench_startup

        return exit_code(lambda: bench_startup(args), (JaxserveError,))
    # Imported only here: the load generator must not import jax, which takes a device's memory.
    from jaxserve.bench.offline import EXPECTED, bench_offline

    return exit_code(lambda: bench_offline(args), EXPECTED)


if __name__ == "__main__":
    sys.exit(main())
