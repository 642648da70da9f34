"""The process's own platform: the CPU, whatever the plan is for, so that nobody looks for a TPU or a GPU."""

import os

import jax

from jaxserve.plan.topology import Topology
from sharding.absent import ENVIRONMENT


def prepare_platform(topology: Topology) -> None:
    """Before jax is first used. libtpu reads its settings from the environment."""
    os.environ.update(ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # what is for no device here cannot be read back
    if topology.chip is None:
        jax.config.update("jax_num_cpu_devices", topology.count)
