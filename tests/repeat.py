"""Run the tests several times in random order, every second time beside two busy processes.

    python -m tests.repeat [--runs 2] [-- PYTEST_ARGS ...]

The seed of a run's order is its number, so that a red run can be had again:

    python -m pytest -p randomly --randomly-seed=3

Exit code: 0 when every run was green, 1 otherwise.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

RUNS = 2
BUSY_PROCESSES = 2
BUSY = "while True: pass"


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    red = []
    for seed in range(1, args.runs + 1):
        beside = BUSY_PROCESSES if seed % 2 == 0 else 0
        began = time.monotonic()
        with busy(beside):
            code = run_tests(seed, args.pytest_args)
        minutes = (time.monotonic() - began) / 60
        print(
            f"run {seed}, {beside} busy processes: exit code {code}, {minutes:.1f} min", flush=True
        )
        if code != 0:
            red.append(seed)
    print(f"{len(red)} of {args.runs} runs were red: seeds {red}" if red else "all runs were green")
    return 1 if red else 0


def run_tests(seed: int, pytest_args: Sequence[str]) -> int:
    """Run the tests once, in the order that the seed gives; return pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "randomly", f"--randomly-seed={seed}"]
    return subprocess.run([*command, *pytest_args], check=False).returncode


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` cores busy with something else."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.repeat", description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS, help=f"how often (default {RUNS})")
    parser.add_argument("pytest_args", nargs="*", help="arguments of pytest, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
