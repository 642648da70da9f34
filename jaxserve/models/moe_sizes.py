"""Static sizes of expert layers: buffers of the all-to-all, blocks of rows, demands on the kernel.

They follow from shapes alone, so that the planner computes them without compiling.
"""

import math
from typing import Final

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.models.mixture import Mixture
from jaxserve.models.quant import QuantScheme
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels.grouped_matmul.api import Demand, GroupedMatmul, Options
from jaxserve.pallas_kernels.grouped_matmul.grouping import blocks_needed
from jaxserve.sharding.mesh import device_kind

# Rows that an expert shard computes in one wave however unevenly tokens are routed. With more, a
# wave has room for about twice an even share, and uneven steps take several waves.
ROWS_AT_ONCE: Final = 2**13
# An all-to-all is used if it moves at most this share of what an all-gather does: a smaller saving
# does not pay for compiling both and deciding in every step.
MAX_ALL_TO_ALL_SHARE: Final = 0.75


def all_to_all_capacity(mixture: Mixture, tokens: int, shards: int) -> int | None:
    """Return how many of a shard's `tokens` tokens may go to one other shard in an all-to-all.

    None where an all-gather costs hardly more. Routed evenly, a token has an expert on a given
    shard with probability 1 - (1 - 1/shards)^X; the capacity is the expected number of tokens and
    four standard deviations, rounded up to a multiple of 8.
    """
    share = 1 - (1 - 1 / shards) ** mixture.taken
    needed = math.ceil(tokens * share + 4 * math.sqrt(tokens * share * (1 - share)))
    rounded = -(-needed // 8) * 8
    return rounded if shards > 1 and rounded <= MAX_ALL_TO_ALL_SHARE * tokens else None


def block_rows(
    mixture: Mixture, tokens: int, shards: int, kernel: GroupedMatmul, dtype: jnp.dtype
) -> int:
    """Return the rows in a block of one expert, where each of the shards has `tokens` tokens."""
    return kernel.block_rows(dtype, -(-tokens * shards * mixture.taken // mixture.experts))


def fits_at_once(rows: int) -> bool:
    """Return whether an expert shard computes this many rows in one wave in any case."""
    return rows <= ROWS_AT_ONCE


def blocks_at_once(mixture: Mixture, tokens: int, assignments: int, shards: int, block: int) -> int:
    """Return how many blocks an expert shard computes in one wave.

    The wave holds all blocks that the assignments could need, where those are few; otherwise twice
    the rows that even routing of every shard's `tokens` would send, since in the worst case all
    tokens come here.

    Args:
        assignments: Number of pairs of a token and one of its experts that may reach the shard.
    """
    local = mixture.experts // shards
    limit = blocks_needed(assignments, local, block)
    if shards == 1 or fits_at_once(limit * block):
        return limit
    return min(limit, -(-2 * tokens * mixture.taken // block) + local)


def kernel_demands(
    spec: ModelSpec,
    tokens: int,
    mesh: Mesh,
    kernel: GroupedMatmul,
    dtype: jnp.dtype,
    scheme: QuantScheme | None = None,
) -> list[tuple[Options, Demand]]:
    """Return what an expert layer asks of the kernel in a step with `tokens` tokens per lane.

    Args:
        scheme: Scheme of quantized experts.
    """
    mixture = spec.mixture
    assert mixture
    shards = mesh.shape["expert"]
    columns = mixture.d_expert // mesh.shape["tensor"]
    kind = device_kind(mesh)
    size = block_rows(mixture, tokens, shards, kernel, dtype)
    rows = size * blocks_at_once(mixture, tokens, tokens * shards * mixture.taken, shards, size)
    local = mixture.experts // shards
    up = _quantized(Demand(rows, local, 2, spec.d_model, columns, dtype, kind), scheme)
    down = _quantized(Demand(rows, local, 1, columns, spec.d_model, dtype, kind), scheme)
    return [(Options(size, jnp.dtype(jnp.float32), kind), up), (Options(size, dtype, kind), down)]


def _quantized(demand: Demand, scheme: QuantScheme | None) -> Demand:
    """Return the demand with the scheme's numbers and its scales per column."""
    if scheme is None:
        return demand
    scales = demand.contracted // scheme.group if scheme.group else 1
    return demand._replace(numbers=scheme.dtype, scales=scales)
