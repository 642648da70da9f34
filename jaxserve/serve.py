"""Entry point of `jaxserve serve`: reads and checks its arguments, without jax."""

from jaxserve.sigint import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()  # before the imports that take seconds

import argparse
import sys
from collections.abc import Sequence

from jaxserve.backends import importing_jax
from jaxserve.cli.checks import check_engine_flags, resolve_models
from jaxserve.cli.exits import exit_code
from jaxserve.cluster.hosts import Hosts, leave
from jaxserve.server.disaggregation.flags import check_role, meshes
from jaxserve.server.flags import check_places, limits, parser
from jaxserve.server.observe.log import configure
from jaxserve.server.security.tls import check_tls_flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server and return its exit code.

    0 after a drain, 130 after one that Ctrl-C began or cut, 2 when the flags ask for something that
    cannot be done, 70 when the engine, a listener or another host of the pod failed.
    """
    args = parser().parse_args(arguments)
    configure(args.log_format, args.log_level)
    return leave(exit_code(lambda: run(args)))


def run(args: argparse.Namespace) -> int:
    """Check the arguments, then import jax and serve; return the exit code."""
    hosts = Hosts.of(args)
    limits(args)
    meshes(args)
    check_role(args)
    check_tls_flags(args.tls_cert, args.tls_key, args.tls_client_ca)
    if args.bundle is None:  # it decides what the flags leave open
        check_engine_flags(args)
    if hosts.alone:
        resolve_models(args)
        check_places(args)
    with importing_jax():
        from jaxserve.server.program import run as serve

    return serve(args, hosts)


if __name__ == "__main__":
    sys.exit(main())
