"""A layer that is a short convolution between two gates, in place of attention (LFM2)."""

from typing import Final

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.models.layer_kind import ConvState
from jaxserve.models.layers import flatten, project
from jaxserve.models.sharded_state import LayerStates, Recurrence, Unsettled
from jaxserve.pallas_kernels.short_convolution.api import ConvStates

AXES: Final = {"conv_in": "Dke", "conv_taps": "tkf", "conv_out": "kfD"}


def short_convolution(
    state: ConvState,
    weights: dict,
    x: Float[Array, "T D"],
    recurrence: Recurrence,
    states: ConvStates,
) -> tuple[Float[Array, "T D"], LayerStates | Unsettled]:
    """Return the layer's answer for its tokens, and the states behind them."""
    # A head has the gates before the convolution, those behind it, and what they gate.
    mixed = project("TD,Dke->Tke", x, weights, "conv_in").astype(x.dtype)
    before, behind, values = jnp.split(mixed, 3, axis=-1)
    out, advanced = recurrence(before * values, weights["conv_taps"], states)
    gated = behind * out.astype(x.dtype)
    flat = weights | {"conv_out": flatten(weights["conv_out"])}
    out = project("TM,MD->TD", gated.reshape(len(x), -1), flat, "conv_out")
    return out.astype(x.dtype), advanced
