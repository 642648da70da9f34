"""Thoughts with a budget: when the device closes one, and with which tokens.

A row's `closes_at` is the position of the first token that closes its thought. It becomes NEVER as
soon as the thought has ended before, or the output has begun without one. See row_fields.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
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
    expected = _tokens_at(params.opening, positions - params.opens_at[..., None])
    is_answer = (expected != NO_TOKEN) & (tokens != expected)
    return jnp.where((live & (is_end | is_answer)).any(-1), NEVER, params.closes_at)


def thoughts_after(
    params: RowSampling[jax.Array],
    tokens: Int[Array, "*rows n"],
    positions: Int[Array, "*rows n"],
    live: Bool[Array, "*rows n"],
) -> RowSampling[jax.Array]:
    """Return the parameters of rows behind n more of their tokens, of which no other is drafted.

    Args:
        live: False for entries of `tokens` that are padding.
    """
    is_first = live & (positions == params.opens_at[..., None])
    later = (is_first & (tokens == params.gap[..., None])).any(-1)
    opens_at = jnp.where(later, params.opens_at + 1, params.opens_at)
    moves = later & (params.closes_at < NEVER)
    closes_at = jnp.where(moves, params.closes_at + 1, params.closes_at)
    gap = jnp.where(later, NO_TOKEN, params.gap)
    moved = replace(params, opens_at=opens_at, closes_at=closes_at, gap=gap)
    return replace(moved, closes_at=closes_after(moved, tokens, positions, live))


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
    token = _tokens_at(closing, (position - closes_at)[:, None])[:, 0]
    return jnp.where(token != NO_TOKEN, token, tokens)


def _tokens_at(tokens: Int[Array, "*rows m"], index: Int[Array, "*rows n"]) -> jax.Array:
    """Return the tokens of a padded list by their index; NO_TOKEN outside of it."""
    # The lists are short, and no token is larger than NO_TOKEN.
    shape = (*index.shape, tokens.shape[-1])
    asked = index[..., None] == lax.broadcasted_iota(jnp.int32, shape, index.ndim)
    return jnp.where(asked, tokens[..., None, :], NO_TOKEN).min(-1)
