"""Positions of a step's tokens, which are packed chunk after chunk.

In shapes, A counts lanes, T the packed tokens of a lane, and R its chunks. Each chunk is of another
row of the lane.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.engine.device.lane_index import take


class TokenLayout(NamedTuple):
    """Chunk, position and validity of every packed token of a step."""

    lengths: Int[Array, "A R"]  # of each chunk's row once the step is done; 0 for padding
    starts: Int[Array, "A R+1"]  # chunk r's tokens are starts[r]:starts[r+1]
    split: Int[Array, "A 2"]  # number of chunks of one token, which come first; number of chunks
    chunk: Int[Array, "A T"]  # of each token
    position: Int[Array, "A T"]  # of each token in its sequence; 0 for padding
    live: Bool[Array, "A T"]  # False for padding

    @staticmethod
    def of_chunks(begin: Int[Array, "A R"], sizes: Int[Array, "A R"], tokens: int) -> "TokenLayout":
        """Lay out chunks that begin at these positions and have these sizes, 0 for padding.

        Args:
            tokens: Number T of packed tokens, at least the sum of a lane's sizes.
        """
        lengths = jnp.where(sizes > 0, begin, 0) + sizes
        starts = jnp.pad(jnp.cumsum(sizes, axis=-1), ((0, 0), (1, 0)))
        index = jnp.arange(tokens)
        # One fused comparison of all pairs: a bisection is a loop of many small kernels.
        ended = starts[:, 1:, None] <= index[None, None]
        # Padding behind the last token belongs to no chunk; any index that exists will do.
        chunk = jnp.minimum(ended.sum(1, dtype=jnp.int32), lengths.shape[-1] - 1)
        live = index[None] < starts[:, -1:]
        position = take(lengths, chunk) - take(starts[:, 1:], chunk) + index[None]
        split = jnp.stack([(sizes == 1).sum(-1), (sizes > 0).sum(-1)], axis=-1).astype(jnp.int32)
        return TokenLayout(lengths, starts, split, chunk, jnp.where(live, position, 0), live)


def last_of_chunks(hidden: Float[Array, "A T D"], layout: TokenLayout) -> Float[Array, "A R D"]:
    """Return the hidden state of each chunk's last token."""
    return take(hidden, jnp.maximum(layout.starts[:, 1:] - 1, 0))
