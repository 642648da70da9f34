"""Entry point of `jaxserve bench serve | overload | offline | startup`."""

from jaxserve.sigint import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()  # before the imports that take seconds

import sys
from collections.abc import Sequence

from jaxserve.backends import importing_jax
from jaxserve.bench.flags import (
    BenchOptions,
    BenchServeOptions,
    OfflineOptions,
    OverloadOptions,
    StartupOptions,
    parse,
    parser,
)
from jaxserve.bench.offline_cases import check_offline
from jaxserve.cli.checks import check_engine_flags, with_found_models
from jaxserve.cli.exits import exit_code
from jaxserve.cli.output import prepare_output
from jaxserve.cluster.hosts import HostOptions

__all__ = ["main", "parser"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark and return its exit code.

    0; 1 if a server answered no request; 2, with one line on standard error, if something asked for
    cannot be done; 130 after Ctrl-C, when what was measured so far has been printed.
    """
    options = parse(arguments)
    prepare_output(as_json=options.output == "json")
    return exit_code(lambda: run(options))


def run(options: BenchOptions) -> int:
    """Run a benchmark. Only offline imports jax, which takes a device's memory."""
    if isinstance(options, BenchServeOptions):
        from jaxserve.bench.serve import bench_serve

        return bench_serve(options)
    if isinstance(options, OverloadOptions):
        from jaxserve.bench.overload import bench_overload

        return bench_overload(options)
    if isinstance(options, StartupOptions):
        from jaxserve.bench.startup import bench_startup, check_startup

        check_startup(options)
        check_engine_flags(options.engine, HostOptions())
        return bench_startup(with_found_models(options))
    assert isinstance(options, OfflineOptions)
    check_engine_flags(options.engine, HostOptions())
    check_offline(options)
    options = with_found_models(options)
    with importing_jax():
        from jaxserve.bench.offline import bench_offline

    return bench_offline(options)


if __name__ == "__main__":
    sys.exit(main())
