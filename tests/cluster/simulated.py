"""Ray cluster whose nodes are processes of this machine, with chips that are numbers only."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import ray
from ray.cluster_utils import Cluster

from tests.compiled_steps import compiled_steps_folder
from tests.jaxserve.cluster.processes import CACHE, DRAFT, SMALL

CHIPS = {"TPU": 4.0}
MODEL = str(DRAFT)
NAME = DRAFT.name
# Of processes of an engine: two devices each.
DEVICES = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
SERVE = ["serve", MODEL, *SMALL, *CACHE]
ON_TWO_HOSTS = ["--data", "2", "--tensor", "2"]
OPTIONS = {"dtype": "float32", "compilation_cache": compiled_steps_folder()}  # of an LLM
CPUS = 2  # of a node: each may become a process of Ray
SECONDS = 200.0  # for what takes a few


class SimulatedCluster:
    """Ray cluster of this process, with this process as its driver."""

    def __init__(self) -> None:
        self._cluster = Cluster()
        self._cluster.add_node(num_cpus=CPUS)
        ray.init(address=self._cluster.address, log_to_driver=False)

    @property
    def address(self) -> str:
        """Address by which other drivers join the cluster."""
        return self._cluster.address

    def add_node(self, resources: dict[str, float] = CHIPS, **options: Any) -> Any:
        """Add a node, and return its handle."""
        return self._cluster.add_node(num_cpus=CPUS, resources=resources, **options)

    def remove_node(self, node: Any) -> None:
        """Kill a node, with all processes on it, and wait until the cluster knows.

        Until then actors may be started on it.
        """
        self._cluster.remove_node(node, allow_graceful=False)
        eventually(lambda: not any(is_alive(each, node.node_id) for each in ray.nodes()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()
        self._cluster.shutdown()


def is_alive(node: dict[str, Any], node_id: str) -> bool:
    """Return whether a node of Ray's list is this one and lives."""
    return node["NodeID"] == node_id and node["Alive"]


def processes(*words: str) -> list[int]:
    """Return the ids of the processes whose command line has all of the words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended
            continue
        if all(word in command for word in words):
            found.append(int(folder.name))
    return found


def parent(pid: int) -> int:
    """Return the id of the process that has started another one."""
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


def kill(pid: int) -> None:
    """End a process as the end of its machine would."""
    os.kill(pid, signal.SIGKILL)


def eventually(condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """Wait until a condition holds, and return what it returns."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, f"not within {seconds:g} s"
        time.sleep(0.05)
    return found
