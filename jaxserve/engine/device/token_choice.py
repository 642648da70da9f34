"""Choice of a token by its processed logits: truncation by min_p, top_k and top_p, then a draw.

The vocabulary is never sorted: thresholds are found by bisection over the 32-bit patterns of the
floats, whose order is that of the floats. Noise depends on (seed, choice, position) alone, never on
the step, the row or the batch, so that batching cannot change an answer.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from jaxserve.engine.row_fields import RowSampling

# The purpose of the noise, folded into the key last: another use would take another number.
TOKEN_NOISE = 0


def choose_tokens(
    logits: Float[Array, "B V"], params: RowSampling[jax.Array], position: Int[Array, "B"]
) -> Int[Array, "B"]:
    """Choose one token per row.

    At temperature 0 that is the most probable token, else a draw by Gumbel-max from the tokens that
    min_p, top_k and top_p leave.
    """

    def add_noise(logits: jax.Array) -> jax.Array:
        # With the largest at 0, division by a tiny temperature cannot give inf.
        below_peak = logits - logits.max(-1, keepdims=True)
        scaled = below_peak / jnp.where(params.temperature > 0, params.temperature, 1)[:, None]
        kept = truncate(scaled, params)
        noise = gumbel(params.key, params.choice, position, logits.shape[-1])
        return jnp.where(params.temperature[:, None] > 0, kept + noise, logits)

    drawn = lax.cond(jnp.any(params.temperature > 0), add_noise, lambda logits: logits, logits)
    return jnp.argmax(drawn, axis=-1)


def truncate(logits: Float[Array, "B V"], params: RowSampling[jax.Array]) -> Float[Array, "B V"]:
    """Set tokens outside min_p, then top_k, then top_p to -inf; ties with the last one stay in.

    min_p is relative to the largest probability, top_p to the mass that top_k left.

    Args:
        logits: Logits scaled by the temperature, the largest of a row at 0.
    """

    def apply(logits: jax.Array) -> jax.Array:
        logits = jnp.where(logits >= jnp.log(params.min_p)[:, None], logits, -jnp.inf)
        # top_k is a mass too, where each token weighs 1.
        k = jnp.where(params.top_k > 0, params.top_k, logits.shape[-1]).astype(jnp.float32)
        logits = _keep_mass(logits, jnp.ones_like(logits), k)
        mass = jnp.exp(logits)
        # At least the smallest number: a target of 0 would be reached without the peak.
        share = jnp.maximum(params.top_p * mass.sum(-1), jnp.finfo(jnp.float32).tiny)
        target = jnp.where(params.top_p < 1, share, jnp.inf)
        return _keep_mass(logits, mass, target)

    limited = (params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0)
    asked = (params.temperature > 0) & limited
    return lax.cond(jnp.any(asked), apply, lambda logits: logits, logits)


@jax.jit  # two calls are traced and lowered as one
def _keep_mass(
    logits: Float[Array, "B V"], mass: Float[Array, "B V"], target: Float[Array, "B"]
) -> Float[Array, "B V"]:
    """Keep the fewest of the largest logits whose masses add up to `target`; others become -inf.

    All are kept where they never add up to it.
    """
    order = ordered(logits)

    def add_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        higher = threshold | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        reached = jnp.where(order >= higher[:, None], mass, 0).sum(-1) >= target
        return jnp.where(reached, higher, threshold)

    # Find the highest threshold that reaches the target, bit by bit from the top.
    threshold = lax.fori_loop(0, 32, add_bit, jnp.zeros(logits.shape[0], jnp.uint32))
    return jnp.where(order >= threshold[:, None], logits, -jnp.inf)


def ordered(x: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Map floats to unsigned integers of the same order; 0.0 and -0.0 become equal."""
    sign = jnp.uint32(1 << 31)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits = jnp.where(bits == sign, 0, bits)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def gumbel(
    key: UInt32[Array, "B 2"], choice: Int[Array, "B"], position: Int[Array, "B"], vocab: int
) -> Float[Array, "B V"]:
    """Draw Gumbel noise from seed, choice index and absolute position alone (threefry2x32)."""

    def one_row(key: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
        folded = jax.random.wrap_key_data(key, impl="threefry2x32")
        data = jnp.stack([choice, position, jnp.int32(TOKEN_NOISE)])
        # A loop, because three calls would compile three copies of threefry.
        folded = lax.fori_loop(
            0, len(data), lambda i, key: jax.random.fold_in(key, data[i]), folded
        )
        # With the 23 random bits of mode "low", a token of probability 1e-7 would come half as
        # often as it should.
        return jax.random.gumbel(folded, (vocab,), jnp.float32, mode="high")

    return jax.vmap(one_row)(key, choice, position)
