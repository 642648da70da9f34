"""How many pages a device has room for: planned from the compiler's numbers, not guessed as a
fraction.
"""

import math
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, MemoryLimitError
from jaxserve.models.spec import ModelSpec
from pallas_kernels.paged_attention.api import Layout, PagedAttention
from sharding.mesh import spans_hosts
from sharding.params import stored_bytes

UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
HOST_SHARE = 0.5  # of a machine's memory, where the device is the host itself
MIB = 2**20


@dataclass(frozen=True)
class Budget:
    """What there is on one device, and what is taken from it beside the cache, in bytes.

    temporaries: of the step with the most, since one runs at a time. programs: compiled steps, all
    of them loaded; 0 where the compiler does not say (XLA:GPU). pieces: of pages on their way from
    and to other engines.
    """

    limit: int
    weights: int
    rows: int
    temporaries: int = 0
    programs: int = 0
    pieces: int = 0

    @property
    def left(self) -> int:
        """For the cache; negative when there is not enough for the rest."""
        return (
            self.limit - self.weights - self.rows - self.temporaries - self.programs - self.pieces
        )

    def __str__(self) -> str:
        taken = {
            "weights": self.weights,
            "rows": self.rows,
            "temporaries of the largest step": self.temporaries,
        }
        taken |= {"compiled steps": self.programs, "pages for other engines": self.pieces}
        return ", ".join(f"{name} {size / 2**30:.2f}" for name, size in taken.items() if size)


def device_limit(mesh: Mesh) -> int:
    """Bytes that one device of the mesh may use; on several hosts, the least that one of them has,
    in whole MiB.
    """
    limit = _limit_here(mesh)
    if not spans_hosts(mesh):
        return limit
    return int(multihost_utils.process_allgather(np.int32(limit // MIB)).min()) * MIB


def _limit_here(mesh: Mesh) -> int:
    device = mesh.local_devices[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if device.platform != "cpu":
        raise ConfigError(f"{device.device_kind} does not report its memory; give --cache-tokens")
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(host * HOST_SHARE) // len(mesh.local_devices)


def bytes_per_device(tree: object) -> int:
    """Bytes that a pytree of sharded arrays (or their abstract values) takes on one device."""
    return sum(
        stored_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        for leaf in jax.tree.leaves(tree)
    )


def page_bytes(kernel: PagedAttention, layout: Layout) -> int:
    """Bytes of one page of one layer, as the implementation lays it out, without the padding of a
    chip's tiles.
    """
    page = jax.eval_shape(partial(kernel.allocate, 1, layout))
    return sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves(page))


def cache_bytes(spec: ModelSpec, config: EngineConfig, kernel: PagedAttention, tensor: int) -> int:
    """Bytes of all pages of a lane on one device."""
    groups, dtype = zip(spec.page_groups(), config.pools, strict=True), jnp.dtype(config.page_dtype)
    return sum(
        pool.pages
        * len(group.layers)
        * page_bytes(kernel, group.layout(config.page_size, dtype, shards=tensor))
        for group, pool in groups
    )


def check_fits(budget: Budget, cache: int) -> None:
    """MemoryLimitError when a cache of the size that was asked for cannot fit; in bytes of one
    device.
    """
    if cache > budget.left:
        raise MemoryLimitError(
            f"--cache-tokens asks for {cache / 2**30:.2f} GiB per device; beside {budget} that "
            f"exceeds the "
            f"{budget.limit / 2**30:.2f} GiB there are (lower it)",
            missing=cache - budget.left,
        )


def affordable_pages(budget: Budget, cache: Callable[[int], int], wanted: int) -> int:
    """The most pages, up to `wanted`, whose cache fits into what the budget leaves.

    cache: bytes of a cache of so many pages, growing with them. All bytes are of one device.
    MemoryLimitError when not even one page fits.
    """
    pages = bisect_right(range(1, wanted + 1), budget.left, key=cache)
    if pages == 0:
        raise MemoryLimitError(
            f"no memory is left for the KV cache: {budget.limit / 2**30:.2f} GiB per device, "
            f"{budget} "
            "(lower --max-batch, use --prefer latency, or raise --tensor)",
            missing=cache(1) - budget.left,
        )
    return pages


@contextmanager
def memory_errors(step: str) -> Iterator[None]:
    """MemoryLimitError, in the compiler's own words, where it finds that a step cannot fit."""
    try:
        yield
    except JaxRuntimeError as error:
        words = str(error).strip().splitlines()[0]
        if not words.startswith("RESOURCE_EXHAUSTED"):
            raise
        raise MemoryLimitError(f"{step}: the compiler says {words}", _missing(words)) from None


def _missing(words: str) -> int:
    """(17.12G) exceeds available HBM (15.75G) -> 1.37 GiB; 0 where the words have no two sizes."""
    sizes = [
        float(number) * 2 ** UNITS[unit]
        for number, unit in re.findall(r"\(([\d.]+)([KMGT]?)\)", words)
    ]
    return round(sizes[0] - sizes[1]) if len(sizes) == 2 else 0
