"""Routing of tokens to experts: every published variant is a case of one function.

Shazeer et al. 2017; choice by groups: DeepSeek-V2 (Liu et al. 2024); a correction that balances
load: DeepSeek-V3.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.models.layers import project
from jaxserve.models.mixture import Mixture


def route(
    mixture: Mixture, weights: dict, x: Float[Array, "T D"]
) -> tuple[Int[Array, "T X"], Float[Array, "T X"]]:
    """Return the experts of each token, the best first, and the float32 weights of their answers.

    Args:
        weights: Parameters "router", and "router_bias" and "correction" where the layer has them.
    """
    if mixture.router_float32:
        x = x.astype(jnp.float32)
    logits = project("TD,DO->TO", x, weights, "router")
    scores = jax.nn.softmax(logits) if mixture.scores == "softmax" else jax.nn.sigmoid(logits)
    judged = scores
    if mixture.corrected:  # affects the choice, not the weights
        judged = scores + weights["correction"].astype(jnp.float32)[None]
    _, experts = lax.top_k(_in_best_groups(mixture, judged), mixture.taken)
    chosen = jnp.take_along_axis(scores, experts, axis=-1)
    if mixture.normalized:
        chosen = chosen / (chosen.sum(-1, keepdims=True) + 1e-20)
    return experts, chosen * mixture.scale


def _in_best_groups(mixture: Mixture, judged: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """Replace the scores outside the groups that a token may take by -inf."""
    if mixture.groups_taken == mixture.groups:
        return judged
    by_group = judged.reshape(len(judged), mixture.groups, -1)
    best, _ = lax.top_k(by_group, mixture.judges)
    _, taken = lax.top_k(best.sum(-1), mixture.groups_taken)
    is_taken = (taken[:, :, None] == jnp.arange(mixture.groups)[None, None]).any(1)
    return jnp.where(is_taken[:, :, None], by_group, -jnp.inf).reshape(judged.shape)
