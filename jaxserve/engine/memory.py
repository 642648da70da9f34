"""How many pages a device has room for: planned from the compiler's numbers, not guessed as a fraction."""

import math
import os
from bisect import bisect_right
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.spec import ModelSpec
from pallas_kernels.paged_attention.api import Layout, PagedAttention
from sharding.mesh import spans_hosts

HOST_SHARE = 0.5  # of a machine's memory, where the device is the host itself
MIB = 2**20


def device_limit(mesh: Mesh) -> int:
    """Bytes that one device of the mesh may use; on several hosts, the least that one of them has, in whole MiB."""
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
    return sum(leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree))


def page_bytes(kernel: PagedAttention, layout: Layout) -> int:
    """Bytes of one page of one layer, as the implementation lays it out, without the padding of a chip's tiles."""
    page = jax.eval_shape(partial(kernel.allocate, 1, layout))
    return sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves(page))


def cache_bytes(spec: ModelSpec, config: EngineConfig, kernel: PagedAttention, dtype: jnp.dtype, tensor: int) -> int:
    """Bytes of all pages of a lane on one device."""
    groups = zip(spec.page_groups(), config.pools, strict=True)
    return sum(
        pool.pages * len(group.layers) * page_bytes(kernel, group.layout(config.page_size, dtype, shards=tensor))
        for group, pool in groups
    )


def check_fits(limit: int, weights: int, rows: int, cache: int) -> None:
    """ConfigError when a cache of the size that was asked for cannot fit; all in bytes of one device."""
    if weights + rows + cache > limit:
        raise ConfigError(
            f"--cache-tokens asks for {cache / 2**30:.2f} GiB per device; beside weights ({weights / 2**30:.2f}) and "
            f"rows ({rows / 2**30:.2f}) that exceeds the {limit / 2**30:.2f} GiB there are (lower it)"
        )


def affordable_pages(
    limit: int, weights: int, rows: int, temporaries: int, cache: Callable[[int], int], wanted: int
) -> int:
    """The most pages, up to `wanted`, whose cache fits beside weights, rows and the largest step's temporaries.

    cache: bytes of a cache of so many pages, growing with them. All bytes are of one device. ConfigError when not even
    one page fits.
    """
    left = limit - weights - rows - temporaries
    pages = bisect_right(range(1, wanted + 1), left, key=cache)
    if pages == 0:
        raise ConfigError(
            f"no memory is left for the KV cache: {limit / 2**30:.2f} GiB per device, weights {weights / 2**30:.2f}, "
            f"rows {rows / 2**30:.2f}, temporaries of the largest step {temporaries / 2**30:.2f} GiB "
            "(lower --max-batch, use --prefer latency, or raise --tensor)"
        )
    return pages
