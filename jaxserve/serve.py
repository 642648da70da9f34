"""Entry point of `jaxserve serve`: reads and checks its arguments, without jax."""

from jaxserve.sigint import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()  # before the imports that take seconds

import sys
from collections.abc import Sequence

from jaxserve.backends import importing_jax
from jaxserve.cli.checks import check_engine_flags, with_found_models
from jaxserve.cli.exits import exit_code
from jaxserve.cluster.hosts import Hosts, leave
from jaxserve.plan.bundle_folder import read_manifest
from jaxserve.server.disaggregation.flags import check_role
from jaxserve.server.flags import ServeOptions, check_limits, check_places, meshes_of, parse, parser
from jaxserve.server.observe.log import configure, silence_grpc
from jaxserve.server.options import check_ready_when
from jaxserve.server.security.tls import check_tls_flags

__all__ = ["main", "parser"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server and return its exit code.

    0 after a drain, 130 after one that Ctrl-C began or cut, 2 when the flags ask for something that
    cannot be done, 70 when the engine, a listener or another host of the pod failed.
    """
    options = parse(arguments)
    configure(options.operation.log_format, options.operation.log_level)
    silence_grpc()
    return leave(exit_code(lambda: run(options)))


def run(options: ServeOptions) -> int:
    """Check the options, then import jax and serve; return the exit code."""
    hosts = Hosts.of(options.hosts)
    meshes_of(options)
    check_role(options.roles)
    check_limits(options.limits, options.addresses.http)
    check_ready_when(options.operation.ready_when, options.engine.options.deterministic)
    credentials = options.credentials
    check_tls_flags(credentials.tls_cert, credentials.tls_key, credentials.tls_client_ca)
    if options.bundle is None:  # it decides what the flags leave open
        check_engine_flags(options.engine, options.hosts)
    if hosts.alone:
        options = with_found_models(options)
        check_places(options)
        if options.bundle:
            read_manifest(options.bundle)
    with importing_jax():
        from jaxserve.server.program import run as serve

    return serve(options, hosts)


if __name__ == "__main__":
    sys.exit(main())
