"""Log-probabilities of tokens under the model's own distribution, before any sampling parameter."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.engine.device.lane_index import put, take
from jaxserve.sampling_params import MAX_LOGPROBS

# Up to this many, lax.top_k is one kernel on a GPU; beyond it sorts the whole vocabulary.
TOP_K_OF_ONE_PASS = 16

# Of the given tokens, then ids and log-probabilities of the most probable tokens.
LogProbabilities = tuple[Float[Array, "B"], Int[Array, "B 20"], Float[Array, "B 20"]]


def log_probabilities(logits: Float[Array, "B V"], tokens: Int[Array, "B"]) -> LogProbabilities:
    """Return log-probabilities of the given tokens and of the 20 most probable ones.

    A vocabulary of fewer tokens is padded with id -1 and -inf.
    """
    peak = logits.max(-1, keepdims=True)
    total = jnp.log(jnp.exp(logits - peak).sum(-1, keepdims=True))
    chosen = take(logits, tokens[:, None]) - peak - total
    top, ids = _top_k(logits, min(MAX_LOGPROBS, logits.shape[-1]))
    missing = ((0, 0), (0, MAX_LOGPROBS - top.shape[-1]))
    top = jnp.pad(top - peak - total, missing, constant_values=-jnp.inf)
    return chosen[:, 0], jnp.pad(ids, missing, constant_values=-1), top


def no_log_probabilities(logits: Float[Array, "B V"], tokens: Int[Array, "B"]) -> LogProbabilities:
    """Return zeros in the shapes of log_probabilities, for steps in which no row asks."""
    rows = logits.shape[0]
    return (
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((rows, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((rows, MAX_LOGPROBS), jnp.float32),
    )


def _top_k(
    logits: Float[Array, "B V"], count: int
) -> tuple[Float[Array, "B n"], Int[Array, "B n"]]:
    """Return lax.top_k, computed in two passes where one would be slow."""
    first = min(count, TOP_K_OF_ONE_PASS)
    top, ids = lax.top_k(logits, first)
    if count == first:
        return top, ids
    rest = put(logits, jnp.full(ids.shape, -jnp.inf, logits.dtype), ids)
    more, more_ids = lax.top_k(rest, count - first)
    return jnp.concatenate([top, more], -1), jnp.concatenate([ids, more_ids], -1)
