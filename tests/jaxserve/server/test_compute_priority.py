"""Priority of the threads that compute on a CPU, in processes of their own: it stays lowered."""

import subprocess
import sys

import pytest

from jaxserve.server.compute_priority import NICENESS

PROGRAM = """
import os
from pathlib import Path

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
    command = ["nice", f"-{niceness}", sys.executable, "-c", PROGRAM]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [line.rsplit(" ", 1) for line in printed.splitlines()]
    computing = {int(value) for name, value in found if name == "tf_XLAEigen"}
    others = {int(value) for name, value in found if not name.startswith("tf_XLA")}
    assert computing == {min(niceness + NICENESS, 19)}
    assert others == {niceness}
