"""Ends of programs: what is expected is one line, and everything else stays an exception.

Output to /dev/full, where every write fails, is how GNU coreutils test their own tools.
"""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.cli.exits import exit_code

ROOT = Path(__file__).parents[3]
FULL = Path("/dev/full")


@pytest.mark.system
@pytest.mark.skipif(not FULL.exists(), reason="a device of Linux")
@pytest.mark.parametrize(
    "flags", ["doctor", "doctor --json", "plan llama3.1-8b --topology h200x8 --no-compile"]
)
def test_output_that_cannot_be_written(flags: str) -> None:
    """Whether it is written line by line, or at the end."""
    with FULL.open("w") as full:
        command = [sys.executable, "-m", "jaxserve", *flags.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


@pytest.mark.system
def test_output_that_was_closed_before_the_start() -> None:
    command = f"{sys.executable} -m jaxserve doctor >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere/file"),
        OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)),
    ],
)
def test_other_errors_of_the_system_pass_through(error: OSError) -> None:
    def work() -> int:
        raise error

    with pytest.raises(OSError) as caught:
        exit_code(work)
    assert caught.value is error
