"""Flags of the benchmark, and what it needs of this machine."""

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks import disaggregation
from benchmarks.disaggregation.servers import ARRANGEMENTS
from jaxserve.cli.flags import BUNDLED

PROGRAM = "python -m benchmarks.disaggregation"
TRACE = Path("traces/mooncake/conversation_trace.jsonl")  # below JAXSERVE_TEST_DATA
RATES = (0.0, 1.0, 2.0)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program."""
    p = argparse.ArgumentParser(
        prog=PROGRAM, description=(disaggregation.__doc__ or "").splitlines()[0]
    )
    _load_flags(p)
    _server_flags(p)
    p.add_argument(
        "--json", action="store_true", help="print JSON on standard output instead of a table"
    )
    p.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the results as JSON after every load, and charts beside them as .svg",
    )
    return p


def _load_flags(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--trace",
        type=Path,
        default=default_trace(),
        metavar="FILE",
        help="Mooncake's trace as it was published, which says how long the long prompts are "
        f"(default: {TRACE} in the folder that JAXSERVE_TEST_DATA names)",
    )
    p.add_argument(
        "--rate",
        type=float,
        action="append",
        metavar="R",
        help="long prompts per second; may be given several times (default: 0, 1 and 2)",
    )
    p.add_argument(
        "--short",
        type=float,
        default=4.0,
        metavar="R",
        help="short prompts per second (default: 4)",
    )
    p.add_argument(
        "--seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that each load lasts (default: 30)",
    )
    p.add_argument(
        "--token-scale",
        type=float,
        default=1 / 8,
        metavar="X",
        help="factor on the lengths of the trace (default: 0.125)",
    )


def _server_flags(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--model",
        type=Path,
        default=BUNDLED,
        metavar="DIR",
        help="checkpoint folder (default: the bundled model)",
    )
    p.add_argument(
        "--step-tokens",
        type=int,
        default=256,
        metavar="N",
        help="tokens of a step, except in the arrangement neither (default: 256)",
    )
    p.add_argument(
        "--threshold",
        type=int,
        default=256,
        metavar="N",
        help="--prefill-threshold of the decode server, in tokens (default: 256)",
    )
    p.add_argument(
        "--arrangement",
        choices=ARRANGEMENTS,
        action="append",
        help="arrangement to measure; may be given several times (default: all three)",
    )


def default_trace() -> Path | None:
    """Return the trace in the folder of test data; None where no folder is named."""
    data = os.environ.get("JAXSERVE_TEST_DATA")
    return Path(data) / TRACE if data else None


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments, with the cores of the two servers and of the load generator.

    Ends with exit status 2 where something is missing.
    """
    p = parser()
    args = p.parse_args(arguments)
    if args.trace is None:
        p.error(
            f"there is no trace: give --trace FILE, or JAXSERVE_TEST_DATA, a folder with {TRACE}"
        )
    if not args.trace.is_file():
        p.error(f"--trace {args.trace}: there is no such file (Mooncake's trace, FAST 2025)")
    if not shutil.which("taskset"):
        p.error("there is no taskset here, which gives each server a core of its own")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        p.error(f"two servers need a core each; there is {len(cores)}")
    args.rate = args.rate or list(RATES)
    args.server_cores = cores[:2]
    args.generator_cores = cores[2:]
    return args
