"""A compilation cache that several processes write and read at the same time."""

import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import pytest

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]
PROCESSES = 4
STEPS = 6
# Every process compiles the same steps, on a disk so slow that half an entry is there for a while.
WORKER = """
import sys, time, warnings
from pathlib import Path
import jax, numpy as np
from etils import epath
from jaxserve.compilation_cache import share_compiled
from jaxserve.engine.device.compile_counter import CompileCounter

writes = 0

def write_slowly(path, data):
    global writes
    writes += 1
    with open(path, "wb") as file:
        file.write(data[: len(data) // 2])
        file.flush()
        time.sleep(0.1)
        file.write(data[len(data) // 2 :])

warnings.simplefilter("error")
type(epath.Path("/")).write_bytes = write_slowly
jax.config.update("jax_platforms", "cpu")
share_compiled(Path(sys.argv[1]))
counter = CompileCounter()
begin, first, steps = float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
while time.time() < begin:
    time.sleep(0.001)
for step in range(first, first + steps):
    jax.jit(lambda x: x * (1 + step % steps)).lower(np.ones(8, np.float32)).compile()
print(counter.here.hits, writes)
"""


def run_workers(folder: Path, count: int, delay: float) -> list[tuple[int, int]]:
    """Hits and writes of each process; they begin together, after `delay` seconds, each with
    another step."""
    begin = str(time.time() + delay)
    workers = []
    for first in range(count):
        arguments = [sys.executable, "-c", WORKER, str(folder), begin, str(first), str(STEPS)]
        workers.append(subprocess.Popen(arguments, cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True))
    found = []
    for worker in workers:
        out, err = worker.communicate()
        assert worker.returncode == 0, err
        hits, writes = map(int, out.split())
        found.append((hits, writes))
    return found


def test_writers_and_readers_of_one_folder(tmp_path: Path) -> None:
    """No process meets half an entry, of which jax warns; the next process finds all of them."""
    found = run_workers(tmp_path, PROCESSES, delay=5.0)
    assert sum(writes for _, writes in found) >= STEPS, "the slow disk was not used"
    assert run_workers(tmp_path, 1, delay=0.0) == [(STEPS, STEPS)]  # it notes each use
