"""Thoughts with a budget: when the device closes one, and with which tokens.

A row's `closes_at` is the position of the first token that closes its thought. It becomes NEVER as
soon as the thought has ended before, or the output has begun without one. See row_fields.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxserve.engine.row_fields import NEVER, NO_TOKEN, RowSampling


def closes_after(
    params: RowSampling[jax.Array],
    tokens: Int[Array, "*rows n"],
    positions: Int[Array, "*rows n"],
    live: Bool[Array, "*rows n"],
) -> Int[Array, "*rows"]:
    """Return `closes_at` of rows behind n more of their tokens.

    Args:
        live: False for entries of `tokens` that are padding.
    """
    is_end = (tokens == params.thought_end[..., None]) & (positions < params.closes_at[..., None])
    is_answer = (tokens != params.opening[..., None]) & (positions == params.opens_at[..., None])
    return jnp.where((live & (is_end | is_answer)).any(-1), NEVER, params.closes_at)


def close_thoughts(
    tokens: Int[Array, "B"],
    closing: Int[Array, "B 8"],
    closes_at: Int[Array, "B"],
    position: Int[Array, "B"],
) -> Int[Array, "B"]:
    """Put tokens of `closing` in the place of those sampled from `closes_at` on.

    Args:
        position: Position that each token takes.
    """
    size = closing.shape[-1]
    index = position - closes_at
    token = jnp.take_along_axis(closing, jnp.clip(index, 0, size - 1)[:, None], axis=-1)[:, 0]
    return jnp.where((index >= 0) & (index < size) & (token != NO_TOKEN), token, tokens)
