"""Command of the soak: run the servers and the traffic, and say what is not as it should be."""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from rich.console import Console

from benchmarks import soak as package
from benchmarks.device import about
from benchmarks.soak.report import failures, show, to_json
from benchmarks.soak.servers import servers
from benchmarks.soak.soaking import soak
from jaxserve.cli.flags import BUNDLED
from jaxserve.errors import JaxserveError

DRAFT = BUNDLED.with_name("tiny-chat-draft")
SHORTEST = 0.2  # minutes: a line is fitted to a second half of six readings


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=(package.__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--model", type=Path, default=DRAFT)
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if args.minutes < SHORTEST:
        parser.error(f"--minutes is {args.minutes:g}; it must be at least {SHORTEST:g}")
    return args


def main() -> int:
    """Run the program and return its exit code."""
    args = parse_arguments(sys.argv[1:])
    try:
        with servers(args.model, args.deterministic) as running:
            result = asyncio.run(soak(running, args.minutes, args.clients))
    except JaxserveError as error:
        sys.exit(f"error: {error}")
    console = Console(markup=False, highlight=False)
    show(result, running, console)
    if args.out:
        facts = about() | {"deterministic": args.deterministic, "clients": args.clients}
        args.out.write_text(json.dumps(facts | to_json(result, running)) + "\n")
    found = failures(result, running, args.deterministic)
    for line in found:
        console.print(f"FAILED: {line}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
