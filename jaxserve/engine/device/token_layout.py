"""Where the tokens of a step lie: packed chunk after chunk, each of a row of its lane."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Place(NamedTuple):
    """Where the packed tokens of a step lie."""

    lengths: Int[Array, "A R"]  # of each chunk's row once the step is done; 0 for padding
    starts: Int[Array, "A R+1"]  # chunk r's tokens are starts[r]:starts[r+1]
    split: Int[Array, "A 2"]  # chunks of one token, which come first; chunks that are no padding
    chunk: Int[Array, "A T"]  # of each token
    position: Int[Array, "A T"]  # of each token in its sequence; 0 for padding
    live: Bool[Array, "A T"]  # whether it is a token at all


def locate(begin: Int[Array, "A R"], sizes: Int[Array, "A R"], tokens: int) -> Place:
    """Of chunks of these sizes, 0 for padding. begin: position of each one's first token. tokens:
    T.
    """
    lengths = jnp.where(sizes > 0, begin, 0) + sizes
    starts = jnp.pad(jnp.cumsum(sizes, axis=-1), ((0, 0), (1, 0)))
    index = jnp.arange(tokens)
    chunk = jax.vmap(lambda s: jnp.searchsorted(s, index, side="right") - 1)(starts)
    chunk = jnp.minimum(chunk, lengths.shape[-1] - 1)
    live = index[None] < starts[:, -1:]
    position = take(lengths, chunk) - take(starts[:, 1:], chunk) + index[None]
    split = jnp.stack([(sizes == 1).sum(-1), (sizes > 0).sum(-1)], axis=-1).astype(jnp.int32)
    return Place(lengths, starts, split, chunk, jnp.where(live, position, 0), live)


def last(hidden: Float[Array, "A T D"], place: Place) -> Float[Array, "A R D"]:
    """Of each chunk's last token."""
    return take(hidden, jnp.maximum(place.starts[:, 1:] - 1, 0))


def take(field: jax.Array, index: Int[Array, "A n"]) -> jax.Array:
    """[A, n, ...]: field[a, index[a, i]], lane for lane; ids out of range give any entry
    (padding)."""
    return jax.vmap(lambda lane, ids: lane.at[ids].get(mode="clip"))(field, index)


def put(field: jax.Array, index: Int[Array, "A n"], value: jax.Array) -> jax.Array:
    """field[a, index[a, i]] = value[a, i], lane for lane; ids out of range are dropped
    (padding)."""
    return jax.vmap(lambda lane, ids, new: lane.at[ids].set(new, mode="drop"))(field, index, value)
