"""Priority of the threads that compute on a CPU, in processes of their own: it stays lowered."""

import logging
import os
import subprocess
import sys

import pytest

from jaxserve.server import compute_priority
from jaxserve.server.compute_priority import NICENESS, lower_compute_priority

PROGRAM = """
import os
import sys
from pathlib import Path

os.nice(int(sys.argv[1]))

import jax.numpy as jnp

from jaxserve.server.compute_priority import lower_compute_priority

jnp.ones(8).sum().block_until_ready()
for _ in range(2):  # the second changes nothing
    lower_compute_priority()
for folder in Path("/proc/self/task").glob("*"):
    print((folder / "comm").read_text().strip(), os.getpriority(os.PRIO_PROCESS, int(folder.name)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
@pytest.mark.parametrize("niceness", [0, 2, 18])
def test_threads_of_xla_go_behind_all_others(niceness: int) -> None:
    command = [sys.executable, "-c", PROGRAM, str(niceness)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    niceness = min(os.nice(0) + niceness, 19)  # the tests may have one themselves
    found = [line.rsplit(" ", 1) for line in printed.splitlines()]
    computing = {int(value) for name, value in found if name == "tf_XLAEigen"}
    others = {int(value) for name, value in found if not name.startswith("tf_XLA")}
    assert computing == {min(niceness + NICENESS, 19)}
    assert others == {niceness}


def test_a_system_that_does_not_allow_it_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError("not permitted here")

    monkeypatch.setattr(compute_priority, "_computing_threads", lambda: iter([1]))
    monkeypatch.setattr(os, "setpriority", refuse)
    with caplog.at_level(logging.WARNING, "jaxserve.serve"):
        lower_compute_priority()
    assert "not permitted here" in caplog.text
