"""Memory of a device: how many pages it has room for, planned from what the compiler reports."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, StateSize
from jaxserve.errors import ConfigError, MemoryLimitError
from jaxserve.host_memory import host_memory
from jaxserve.models.sharded_state import states_of
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels.paged_attention.api import Layout, PagedAttention
from jaxserve.sharding.mesh import spans_hosts
from jaxserve.sharding.params import stored_bytes

UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}  # powers of 2, as XLA's messages name them
# Where the device is the host itself, arrays take this share of its memory at most. Python, the
# compiler and compiled steps take as much of a small host as of a large one: their bytes go first.
HOST_SHARE = 0.5
HOST_PROGRAM = 2**30
LEAST_SHARE = 1 / 8  # for arrays, on a host that has hardly more than that
MIB = 2**20


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of one device: what there is, and what is taken from it beside the KV cache."""

    limit: int
    weights: int
    rows: int
    temporaries: int = 0  # of the step with the most, since one step runs at a time
    programs: int = 0  # of all compiled steps; 0 where the compiler does not say (XLA:GPU)
    transit: int = 0  # pages on their way from and to other engines
    others: int = 0  # arrays of this process that are not this engine's, as of another engine

    @property
    def left(self) -> int:
        """Bytes for the KV cache; negative when there is not enough for the rest."""
        steps = self.temporaries + self.programs
        return self.limit - self.weights - self.rows - steps - self.transit - self.others

    def __str__(self) -> str:
        taken = {
            "weights": self.weights,
            "rows": self.rows,
            "temporaries of the largest step": self.temporaries,
            "compiled steps": self.programs,
            "pages for other engines": self.transit,
            "other arrays of this process": self.others,
        }
        return ", ".join(f"{name} {size / 2**30:.2f}" for name, size in taken.items() if size)


def device_limit(mesh: Mesh) -> int:
    """Return the bytes that each device of the mesh may use.

    On several hosts, that is the least that any of them reports. Raises ConfigError where a device
    does not report its memory.
    """
    limit = _limit_here(mesh)
    if not spans_hosts(mesh):
        return limit
    # Hosts exchange whole MiB, which fit into an int32.
    return int(multihost_utils.process_allgather(np.int32(limit // MIB)).min()) * MIB


def bytes_of_others(mesh: Mesh, own: object) -> int:
    """Return the bytes that arrays outside the pytree `own` take on each device of a mesh.

    Those are arrays of this process, such as another engine's. On several hosts, the result is the
    most of any host.
    """
    ignored = {id(array) for array in jax.tree.leaves(own)}
    others = [array for array in jax.live_arrays() if id(array) not in ignored]
    taken = max(_bytes_here(others, device) for device in mesh.local_devices)
    if not spans_hosts(mesh):
        return taken
    return int(multihost_utils.process_allgather(np.int32(-(-taken // MIB))).max()) * MIB


def _bytes_here(arrays: Iterable[jax.Array], device: Any) -> int:
    """Return the bytes that arrays take on one device of this host."""
    return sum(
        stored_bytes(array.sharding.shard_shape(array.shape), array.dtype)
        for array in arrays
        if device in array.sharding.addressable_devices and not _is_elsewhere(array, device)
    )


def _limit_here(mesh: Mesh) -> int:
    device = mesh.local_devices[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if device.platform != "cpu":
        raise ConfigError(
            f"{device.device_kind} does not report its memory, so the size of the KV cache cannot "
            "be planned; give it by --cache-tokens"
        )
    memory = host_memory()
    arrays = min(memory * HOST_SHARE, max(memory - HOST_PROGRAM, memory * LEAST_SHARE))
    # The virtual devices of a CPU share one memory, also those that other engines use.
    return int(arrays) // jax.local_device_count("cpu")


def _is_elsewhere(array: jax.Array, device: Any) -> bool:
    """Return whether an array of a device is in the memory of its host."""
    kind = array.sharding.memory_kind
    return kind is not None and kind != device.default_memory().kind


def bytes_per_device(tree: object) -> int:
    """Return the bytes that a pytree of sharded arrays, or abstract ones, takes on one device."""
    return sum(
        stored_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        for leaf in jax.tree.leaves(tree)
    )


def page_bytes(kernel: PagedAttention, layout: Layout) -> int:
    """Return the bytes of one page of one layer, as the kernel lays it out.

    The padding of a chip's tiles is not in it.
    """
    page = jax.eval_shape(partial(kernel.allocate, 1, layout))
    return sum(stored_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(page))


def cache_bytes(spec: ModelSpec, config: EngineConfig, kernel: PagedAttention, tensor: int) -> int:
    """Return the bytes of all pages and slots of a lane on one of the `tensor` devices.

    These split heads among them.
    """
    dtype = jnp.dtype(config.page_dtype)
    total = config.slots * slot_bytes(spec) // tensor
    for group, pool in zip(spec.page_groups(), config.page_pools, strict=True):
        layout = group.layout(config.page_size, dtype, shards=tensor)
        total += pool.pages * len(group.layers) * page_bytes(kernel, layout)
    return total


def slot_bytes(spec: ModelSpec) -> int:
    """Return the bytes of the states of one sequence in all layers; 0 without such layers."""
    if spec.state is None:
        return 0
    leaves = states_of(spec.state, 1)
    return len(spec.state_layers) * sum(stored_bytes(leaf.shape, leaf.dtype) for leaf in leaves)


def state_sizes(spec: ModelSpec) -> list[StateSize]:
    """Return what the states of a model's layers take: one entry, or none without such layers."""
    if spec.state is None:
        return []
    float32 = jnp.dtype(jnp.float32)
    of_tokens = (
        len(group.layers) * group.layout(1, float32).token_bytes for group in spec.page_groups()
    )
    return [StateSize(slot_bytes(spec), sum(of_tokens) // float32.itemsize)]


def check_fits(budget: MemoryBudget, cache: int) -> None:
    """Raise MemoryLimitError when the asked-for cache, `cache` bytes on one device, cannot fit."""
    if cache > budget.left:
        raise MemoryLimitError(
            f"--cache-tokens asks for {cache / 2**30:.2f} GiB per device; with {budget} that "
            f"exceeds the {budget.limit / 2**30:.2f} GiB of a device (lower --cache-tokens)",
            missing=cache - budget.left,
        )


def affordable_pages(budget: MemoryBudget, cache: Callable[[int], int], wanted: int) -> int:
    """Return the largest number of pages, up to `wanted`, whose cache fits into the budget.

    All bytes are of one device.

    Args:
        cache: Function that returns the bytes of a cache by its number of pages, and grows with it.

    Raises:
        MemoryLimitError: Not even one page fits.
    """
    pages = bisect_right(range(1, wanted + 1), budget.left, key=cache)
    if pages == 0:
        share = "give other engines of this process fewer --cache-tokens, " if budget.others else ""
        raise MemoryLimitError(
            f"no memory is left for the KV cache: a device has {budget.limit / 2**30:.2f} GiB, "
            f"which {budget} take up ({share}lower --max-batch, use --prefer latency, or raise "
            f"--tensor)",
            missing=cache(1) - budget.left,
        )
    return pages


@contextmanager
def memory_errors(step: str) -> Iterator[None]:
    """Turn the compiler's finding that a step cannot fit into a MemoryLimitError."""
    try:
        yield
    except JaxRuntimeError as error:
        message = str(error).strip().splitlines()[0]
        if not message.startswith("RESOURCE_EXHAUSTED"):
            raise
        problem = f"{step}: the compiler says {message}"
        raise MemoryLimitError(problem, _missing_bytes(message)) from None


def _missing_bytes(message: str) -> int:
    """Read how much is missing: 1.37 GiB from "(17.12G) exceeds available HBM (15.75G)".

    Returns 0 for messages of another form.
    """
    sizes = [
        float(number) * 2 ** UNITS[unit]
        for number, unit in re.findall(r"\(([\d.]+)([KMGT]?)\)", message)
    ]
    return round(sizes[0] - sizes[1]) if len(sizes) == 2 else 0
