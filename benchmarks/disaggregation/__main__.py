"""Command of the benchmark: measure, report as results come, and print all of them last."""

import argparse
import os
import sys
from typing import Any

import uvloop
from rich.console import Console

from benchmarks.device import versions
from benchmarks.disaggregation.flags import PROGRAM, parse_arguments
from benchmarks.disaggregation.measuring import Result, measure
from benchmarks.disaggregation.report import quantile_cells, show, to_json, write
from jaxserve.bench.environment import IDLE, environment
from jaxserve.errors import JaxserveError


async def run(args: argparse.Namespace, facts: dict[str, Any], console: Console) -> list[Result]:
    """Measure, with a line on the console for each result, which --out gets at once too."""
    results = list[Result]()
    async for result in measure(args):
        results.append(result)
        itl = " / ".join(quantile_cells(result.short.itl))
        console.print(
            f"{result.arrangement}, {result.rate:g} long prompts/s: ITL p50 / p99 {itl} ms"
        )
        if args.out:
            write(args.out, results, facts)
    return results


def main() -> None:
    """Run the program; exit status 1, with one line, if a server fails."""
    args = parse_arguments()
    about = environment(" ".join([PROGRAM, *sys.argv[1:]]))
    facts = {
        **about,
        **versions(),
        "generator": "on other cores" if args.generator_cores else "on the servers' cores",
    }
    console = Console(stderr=True, highlight=False)
    if about["load_before"] > IDLE:
        console.print(f"NOT IDLE: load {about['load_before']} before")
    if args.generator_cores:
        os.sched_setaffinity(0, args.generator_cores)
    try:
        results = uvloop.run(run(args, facts, console))
    except JaxserveError as error:
        sys.exit(f"error: {error}")
    if args.json:
        print(to_json(results, facts), end="")
    else:
        show(results, Console(width=170))


if __name__ == "__main__":
    main()
