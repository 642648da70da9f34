"""python -m jaxserve.bench serve | offline | startup: how fast is it here? Tables on standard
output.
"""

import shlex
import sys
from collections.abc import Sequence

from jaxserve.bench.flags import PROGRAM, parser
from jaxserve.cli.exits import exit_code
from jaxserve.cli.output import prepare_output
from jaxserve.errors import JaxserveError
from jaxserve.tokenizer import TokenizerError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 when a server answered no request; 2, with one line on standard error, for
    what cannot be done.

    130 when it was interrupted, after what was measured so far.
    """
    asked = list(sys.argv[1:] if arguments is None else arguments)
    args = parser().parse_args(asked)
    args.asked, args.command_line = asked, shlex.join([*PROGRAM.split(), *asked])
    prepare_output(as_json=args.output == "json")
    if args.command == "serve":
        from jaxserve.bench.serve import bench_serve

        return exit_code(lambda: bench_serve(args), (JaxserveError, TokenizerError))
    if args.command == "startup":
        from jaxserve.bench.startup import bench_startup

        return exit_code(lambda: bench_startup(args), (JaxserveError,))
    from jaxserve.bench.offline import EXPECTED, bench_offline  # late: the other two need no jax

    return exit_code(lambda: bench_offline(args), EXPECTED)


if __name__ == "__main__":
    sys.exit(main())
