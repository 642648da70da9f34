"""Gated DeltaNet (Yang et al. 2024): a layer with a recurrent state in place of attention.

Projections, rates and the gated norm around the recurrence, as Qwen3-Next has them.
"""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.models.layer_kind import DeltaState
from jaxserve.models.layers import flatten, project, rms_norm
from jaxserve.models.sharded_state import LayerStates, Recurrence, Unsettled
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels.gated_delta.api import DeltaStates, Tokens

NORM: Final = "state_norm"  # multiplies by its weight, whatever the other norms of a model do
AXES: Final = {
    "state_in": "Dke",
    "state_rates": "Dkb",
    "state_taps": "tkf",
    "decay_log": "kr",
    "decay_bias": "kr",
    NORM: "v",
    "state_out": "krvD",
}
# Parameters that are float32 whatever the dtype of the others: small numbers, of which every token
# takes an exponential.
KEPT_FLOAT32: Final = frozenset({"decay_log", "decay_bias"})
# Parameters that files may have in float32 beside weights of 16 bits, as those of Qwen3.5 do.
STORED_FLOAT32: Final = KEPT_FLOAT32 | {NORM}


def gated_delta(
    spec: ModelSpec,
    state: DeltaState,
    weights: dict,
    x: Float[Array, "T D"],
    recurrence: Recurrence,
    states: DeltaStates,
) -> tuple[Float[Array, "T D"], LayerStates | Unsettled]:
    """Return the layer's answer for its tokens, and the states behind them."""
    sizes = state.sizes()
    f = sizes["f"]
    # A key head has its query, its key, its values, and the gates of its values.
    mixed = project("TD,Dke->Tke", x, weights, "state_in").astype(x.dtype)
    tokens = Tokens(mixed[..., :f], *_rates(weights, x, sizes["r"]))
    out, advanced = recurrence(tokens, weights["state_taps"], states)
    normed = rms_norm(out.astype(x.dtype), weights[NORM], spec.norm_eps)
    gate = mixed[..., f:].reshape(out.shape).astype(jnp.float32)
    gated = (normed.astype(jnp.float32) * jax.nn.silu(gate)).astype(x.dtype)
    flat = weights | {"state_out": flatten(weights["state_out"])}
    out = project("TM,MD->TD", gated.reshape(len(x), -1), flat, "state_out")
    return out.astype(x.dtype), advanced


def _rates(
    weights: dict, x: Float[Array, "T D"], r: int
) -> tuple[Float[Array, "T k r"], Float[Array, "T k r"]]:
    """Return the logarithm of each token's decay and its writing strength; float32."""
    rates = project("TD,Dkb->Tkb", x, weights, "state_rates").astype(x.dtype).astype(jnp.float32)
    rate = jnp.exp(weights["decay_log"])[None]
    decay = -rate * jax.nn.softplus(rates[..., r:] + weights["decay_bias"][None])
    return decay, jax.nn.sigmoid(rates[..., :r])
