"""A Ray cluster of simulated nodes on this machine, for `make test-cluster`."""

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

from jaxserve import LLM
from tests.compiled_steps import compiled_steps_folder
from tests.jaxserve.cluster.processes import DRAFT

if TYPE_CHECKING:
    from tests.cluster.simulated import SimulatedCluster

if importlib.util.find_spec("ray") is None:  # the environment of `make test`
    collect_ignore_glob = ["test_*.py"]

HOSTS = 4
OF_NODES = {  # variables, which their workers inherit
    "JAX_PLATFORMS": "cpu",
    "RAY_worker_niceness": "0",  # not 15, with which programs starve beside pytest
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


@pytest.fixture(scope="session")
def cluster() -> Iterator["SimulatedCluster"]:
    """Return a cluster of a head and HOSTS nodes of four TPU chips each, which are simulated."""
    from tests.cluster.simulated import SimulatedCluster

    os.environ.update(OF_NODES)
    with SimulatedCluster() as simulated:
        for _ in range(HOSTS):
            simulated.add_node()
        yield simulated


@pytest.fixture(scope="session")
def texts() -> Iterator[Callable[[Sequence[str], int], list[str]]]:
    """Return a function that says how one LLM of this process completes prompts."""
    with LLM(DRAFT, dtype="float32", compilation_cache=compiled_steps_folder()) as llm:

        def complete(prompts: Sequence[str], max_tokens: int) -> list[str]:
            found = llm.generate(list(prompts), temperature=0.0, max_tokens=max_tokens)
            return [completion.text for completion in found]

        yield complete
