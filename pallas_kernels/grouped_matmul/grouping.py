"""Arrangement of assignments of tokens to experts in blocks of rows of one expert each.

The arrangement counts and does not sort: an assignment's place is the number of those before it
that have the same expert. Within a chunk of assignments they are compared in pairs, and a chunk's
predecessors are known from its experts' running counts, so that all is elementwise arithmetic and
sums, over A x (E + 128) numbers that are never in memory together. A sort would have to be
inverted, by a scatter or by a second sort, and both are slow on a TPU.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxserve.pallas_kernels.grouped_matmul.api import Groups

CHUNK = 128  # assignments that are compared with each other


def blocks_needed(assignments: int, experts: int, block: int) -> int:
    """Return the largest number of blocks that so many assignments can take.

    Most are taken where as many experts as possible have one row: each further block takes `block`
    rows more.
    """
    return min(assignments, experts + max(assignments - experts, 0) // block)


def arrange(ids: Int[Array, "A"], experts: int, block: int) -> tuple[Groups, Int[Array, "A"]]:
    """Return the n = blocks_needed blocks, and each assignment's row in their M = n * block rows.

    Rows of an expert are in the order of their assignments.

    Args:
        ids: Expert of each assignment. An assignment whose id is not in 0..experts-1 is left out,
            and its row is M.
    """
    num_blocks = blocks_needed(len(ids), experts, block)
    chunks = jnp.pad(ids, (0, -len(ids) % CHUNK), constant_values=-1).reshape(-1, CHUNK)
    is_its = chunks[..., None] == jnp.arange(experts)[None, None]  # [chunks, CHUNK, E]
    counts = is_its.sum(1, dtype=jnp.int32)  # [chunks, E]
    ends = jnp.cumsum(counts, axis=0)
    blocks = (counts.sum(0) + block - 1) // block  # [E]
    block_ends = jnp.cumsum(blocks)
    # The row of an expert's next assignment, when a chunk begins.
    row = ((block_ends - blocks) * block)[None] + ends - counts
    place = jnp.arange(CHUNK)
    # Earlier assignments of the same chunk with the same expert.
    is_before = (chunks[:, :, None] == chunks[:, None]) & (place[None] < place[:, None])[None]
    position = jnp.where(is_its, row[:, None], 0).sum(2) + is_before.sum(2, dtype=jnp.int32)
    position = position.reshape(-1)[: len(ids)]
    is_ours = (ids >= 0) & (ids < experts)
    owner = jnp.searchsorted(block_ends, jnp.arange(num_blocks), side="right", method="compare_all")
    groups = Groups(jnp.minimum(owner, experts - 1).astype(jnp.int32), block_ends[-1])
    return groups, jnp.where(is_ours, position, num_blocks * block)
