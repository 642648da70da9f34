"""python -m tests.mutants [NAME ...]: whether the tests notice faults put into the sources.

The tracked files of the working tree are copied once; each mutant of mutants.toml is put into the
copy, the tests that it names are run there, and have to fail. Before that they have to pass
without any mutant: a test that fails anyway notices nothing. The working tree itself is never
touched, but for mutants.toml by --discover.

Exit code: 0 when every mutant was caught; 1 when one survived or could not be run, or when the
table does not fit the sources.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.table import AREAS, ROOT, TABLE, Mutant, problems, read_mutants

PASSED, FAILED = 0, 1  # of pytest's exit codes: all others say that it could not do its work
TAIL = 30  # lines of its output that are shown then
OWN = TABLE.parent.relative_to(ROOT)  # its test fails with any mutant, since it compares the texts
WHERE = """
import importlib.util, sys
for name in sys.argv[1:]:
    print(importlib.util.find_spec(name).origin)
"""
FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::[^\s\[]+(?:\[.*?\])?)?)(?= - |$)", re.M)


@dataclass(frozen=True)
class Result:
    """What became of a mutant. fate: caught, survived or error. test: that caught it.

    told: why there is an error.
    """

    mutant: Mutant
    fate: str
    test: str
    seconds: float
    told: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = _parser()
    options, mutants = parser.parse_args(arguments), read_mutants()
    if found := problems(mutants):
        print(*found, sep="\n", file=sys.stderr)
        return 1
    if options.check:
        print(f"{len(mutants)} mutants fit the sources")
        return 0
    if unknown := set(options.names) - {mutant.name for mutant in mutants}:
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}")
    wanted = [m for m in mutants if options.area in (None, m.area)]
    chosen = [m for m in wanted if not options.names or m.name in options.names]
    if not chosen:
        parser.error(f"none of these mutants is of area {options.area}")
    with copied_tree() as copy:
        check_imports(copy, sorted({Path(mutant.file).parts[0] for mutant in mutants}))
        if not options.trust and not passes_without_mutants(copy, chosen, options.discover):
            return 1
        return report(chosen, results(copy, chosen, options.discover))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutants; all without any")
    parser.add_argument("--area", choices=AREAS, help="only those of this area")
    parser.add_argument("--check", action="store_true", help="only compare table and sources")
    parser.add_argument("--trust", action="store_true", help="no run without mutants first")
    parser.add_argument(
        "--discover",
        nargs="+",
        default=[],
        metavar="TESTS",
        help="run these tests instead of caught_by, and write the first that fails into it",
    )
    return parser


# ---- the copy


@contextlib.contextmanager
def copied_tree() -> Iterator[Path]:
    """A folder with the working tree's tracked files as they are now, and nothing else."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder).resolve() / "tree"
        for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
            if os.path.lexists(ROOT / name):  # one that was removed is still listed
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        yield copy


def environment(copy: Path) -> dict[str, str]:
    """This one's, but packages are those of the copy: for processes that the tests start, too."""
    paths = [str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def check_imports(copy: Path, packages: Sequence[str]) -> None:
    """End unless an interpreter finds these packages in the copy: others may be installed."""
    command = [sys.executable, "-c", WHERE, *packages]
    told = subprocess.check_output(command, cwd=copy.parent, env=environment(copy), text=True)
    for found in told.splitlines():
        if copy not in Path(found).resolve().parents:
            sys.exit(f"{found} would be imported, which is not of the copy {copy}")


@contextlib.contextmanager
def put_in(mutant: Mutant, copy: Path, number: int) -> Iterator[None]:
    """Put the fault into its file as long as the block lasts.

    number: another one for each mutant. The file's time tells Python that what it has compiled is
    not of this text: its size and its second may well be the same.
    """
    path = copy / mutant.file
    data, times = path.read_bytes(), path.stat()
    path.write_text(mutant.applied(data.decode()), "utf-8", newline="")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + number * 10**9))
    try:
        yield
    finally:
        path.write_bytes(data)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


# ---- tests in it


def run_tests(copy: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Of pytest the exit code and what it said, to the first failure."""
    options = ["-q", "-x", "-p", "no:cacheprovider", f"--ignore={OWN}"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    with tempfile.TemporaryFile() as output:  # a pipe would be held open by what a crash leaves
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=environment(copy),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read().decode("utf-8", "replace")


def passes_without_mutants(copy: Path, mutants: Sequence[Mutant], discover: Sequence[str]) -> bool:
    """Whether all tests pass that are to notice something; says which does not."""
    tests = list(discover) or list(dict.fromkeys(test for m in mutants for test in tests_of(m)))
    if not tests:
        return True
    code, said = run_tests(copy, tests)
    if code != PASSED:
        print(f"without any mutant, pytest ends with {code}:\n{tail(said)}", file=sys.stderr)
    return code == PASSED


def tests_of(mutant: Mutant) -> list[str]:
    """The tests of caught_by."""
    return shlex.split(mutant.caught_by)


def results(copy: Path, mutants: Sequence[Mutant], discover: Sequence[str]) -> Iterator[Result]:
    """One after the other, as they come; what is discovered is written down at once."""
    for number, mutant in enumerate(mutants, 1):
        result = tried(mutant, copy, number, discover or tests_of(mutant))
        if discover and result.fate == "caught":
            write_caught_by(mutant.name, result.test)
        yield result


def tried(mutant: Mutant, copy: Path, number: int, tests: Sequence[str]) -> Result:
    """Run these tests with the mutant in the copy."""
    if not tests:
        return Result(mutant, "error", "", 0.0, "caught_by is empty (--discover finds a test)")
    began = time.monotonic()
    with put_in(mutant, copy, number):
        code, said = run_tests(copy, tests)
    seconds = time.monotonic() - began
    if code == PASSED:
        return Result(mutant, "survived", "", seconds)
    first = first_failure(said)
    if code != FAILED or first is None:
        return Result(mutant, "error", "", seconds, f"pytest ended with {code}:\n{tail(said)}")
    return Result(mutant, "caught", first, seconds)


def first_failure(said: str) -> str | None:
    """The node id of the first test that failed, as pytest's summary has it."""
    _, _, summary = said.rpartition("short test summary info")
    found = FAILURE.search(summary)
    return found and found[1]


def tail(said: str) -> str:
    """The last lines of what pytest said."""
    return "\n".join(said.splitlines()[-TAIL:])


def write_caught_by(name: str, test: str, table: Path = TABLE) -> None:
    """Set caught_by of this mutant in the table, and change nothing else there."""
    before, mark, after = table.read_text("utf-8").partition(f'\nname = "{name}"\n')
    line = f"caught_by = {json.dumps(shlex.quote(test), ensure_ascii=False)}"
    after = re.sub(r"^caught_by = .*$", lambda _: line, after, count=1, flags=re.MULTILINE)
    table.write_text(before + mark + after, "utf-8")


# ---- what is printed


def report(mutants: Sequence[Mutant], results: Iterator[Result]) -> int:
    """Print a row for each result as it comes, and the counts at the end; the exit code."""
    columns = zip(*[(m.area, m.name, m.caught_by) for m in mutants], strict=True)
    widths = [max(map(len, ("caught by", *column))) for column in columns]
    _print_row(widths, ("area", "name", "caught by"), "seconds")
    fates = Counter[str]()
    for result in results:
        fates[result.fate] += 1
        what = result.test if result.fate == "caught" else result.fate.upper()
        cells = result.mutant.area, result.mutant.name, what
        _print_row(widths, cells, f"{result.seconds:7.1f}")
        if result.told:
            print(result.told, flush=True)
    print(f"{fates['caught']} caught, {fates['survived']} survived, {fates['error']} errors")
    return 0 if fates["caught"] == len(mutants) else 1


def _print_row(widths: Sequence[int], cells: Sequence[str], last: str) -> None:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
    print("  ".join([*padded, last]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
