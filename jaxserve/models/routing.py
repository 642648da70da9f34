"""Which experts a token takes, and with what weights: every published way is a case of one.

Shazeer et al. 2017; by groups: DeepSeek-V2 (Liu et al. 2024); with a correction that balances:
DeepSeek-V3.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.models.layers import project
from jaxserve.models.spec import Mixture


def route(
    mixture: Mixture, weights: dict, x: Float[Array, "T D"]
) -> tuple[Int[Array, "T X"], Float[Array, "T X"]]:
    """The experts of each token, the best first, and the weights of their answers, float32.

    weights: the layer's "router", "router_bias" and "correction", as far as it has them.
    """
    logits = project("TD,DO->TO", x, weights, "router")
    scores = jax.nn.softmax(logits) if mixture.scores == "softmax" else jax.nn.sigmoid(logits)
    judged = (
        scores + weights["correction"].astype(jnp.float32)[None] if mixture.corrected else scores
    )
    _, experts = lax.top_k(_in_best_groups(mixture, judged), mixture.taken)
    chosen = jnp.take_along_axis(scores, experts, axis=-1)
    if mixture.normalized:
        chosen = chosen / (chosen.sum(-1, keepdims=True) + 1e-20)
    return experts, chosen * mixture.scale


def _in_best_groups(mixture: Mixture, judged: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """-inf outside the groups that the token may take."""
    if mixture.groups_taken == mixture.groups:
        return judged
    by_group = judged.reshape(len(judged), mixture.groups, -1)
    best, _ = lax.top_k(by_group, mixture.judges)
    _, taken = lax.top_k(best.sum(-1), mixture.groups_taken)
    is_taken = (taken[:, :, None] == jnp.arange(mixture.groups)[None, None]).any(1)
    return jnp.where(is_taken[:, :, None], by_group, -jnp.inf).reshape(judged.shape)
