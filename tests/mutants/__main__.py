"""Put faults into a copy of the sources, one after the other: the tests have to notice each.

    python -m tests.mutants [NAME | AREA ...]

The tests that a mutant of mutants.toml names have to pass without it, and fail with it. Exit code:
0 when every mutant was caught, 1 otherwise.
"""

import io
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.table import ROOT, TABLE, Mutant, problems, read_mutants

PASSED, FAILED = 0, 1  # of pytest's exit codes; all others mean that it could not do its work
OWN = TABLE.parent.relative_to(ROOT)  # compares the table with the sources: fails with any mutant


def main(wanted: Sequence[str]) -> int:
    mutants = read_mutants()
    if found := problems(mutants):
        sys.exit("\n".join(found))
    if unknown := set(wanted) - {name for m in mutants for name in (m.name, m.area)}:
        sys.exit(f"there is no mutant and no area {', '.join(sorted(unknown))}")
    chosen = [m for m in mutants if not wanted or m.name in wanted or m.area in wanted]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_sources(Path(folder))
        fates = [try_mutant(mutant, Path(folder)) for mutant in chosen]
    print(f"{fates.count('caught')} of {len(chosen)} mutants were caught")
    return 0 if fates.count("caught") == len(chosen) else 1


def copy_sources(folder: Path) -> None:
    """Write the tracked files of the working tree, as they are now, to a folder."""
    commit = git("stash", "create").decode().strip() or "HEAD"
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        archive.extractall(folder, filter="data")


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


def try_mutant(mutant: Mutant, copy: Path) -> str:
    """Run a mutant's tests without and with it; return `caught`, or what happened instead."""
    path = copy / mutant.file
    source = path.read_text("utf-8")
    fate = "its tests do not pass without it"
    if run_tests(mutant, copy) == PASSED:
        path.write_text(mutant.applied(source), "utf-8", newline="")
        code = run_tests(mutant, copy)
        path.write_text(source, "utf-8", newline="")
        fate = {PASSED: "survived", FAILED: "caught"}.get(code, f"pytest ended with {code}")
    print(f"{mutant.area:14}{mutant.name:50}{fate}", flush=True)
    return fate


def run_tests(mutant: Mutant, copy: Path) -> int:
    """Return pytest's exit code; a process that the tests start imports the copy, too."""
    tests = shlex.split(mutant.caught_by)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    # Compiled sources could be taken for those of a mutant of the same size and second.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*command, f"--ignore={OWN}"], cwd=copy, env=environment, stdout=subprocess.DEVNULL
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
