"""The decoder of all families: its parameters, and token ids to hidden states to logits.

Layers are unrolled, with one leaf per weight and layer: a scan over stacked weights would copy
every layer's weights in each step.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.cpu_kernels.products import CpuProduct
from jaxserve.errors import ModelError
from jaxserve.models import attention, gated_delta, latent, moe, short_convolution
from jaxserve.models.attention import norm, self_attention
from jaxserve.models.latent import latent_attention
from jaxserve.models.layer_kind import ConvState, DeltaState, LayerKind
from jaxserve.models.layers import einsum, softcap
from jaxserve.models.mlp import gated_mlp
from jaxserve.models.moe import Experts
from jaxserve.models.quant import QuantScheme, quantized_specs
from jaxserve.models.rope import tables
from jaxserve.models.sharded_attention import Attend, Rotation
from jaxserve.models.sharded_state import LayerStates, Recurrence, Unsettled
from jaxserve.models.spec import ModelSpec
from jaxserve.models.summed_last import SummedLast, product_in, summed_last_specs
from jaxserve.pallas_kernels.gated_delta.api import DeltaStates
from jaxserve.pallas_kernels.paged_attention.api import Pages
from jaxserve.pallas_kernels.short_convolution.api import ConvStates
from jaxserve.sharding.params import ParamSpec

NORMS = {
    "before": ("attn_norm", "mlp_norm"),
    "after": ("attn_out_norm", "mlp_out_norm"),
    "around": ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm"),
}
MIN_LENGTH = 1e-12  # divisor of shorter vectors, so that a vector of zeros stays one

Kept = Pages | LayerStates  # what a layer keeps of sequences
Written = Kept | Unsettled  # what a step makes of it
Mixer = Attend | Recurrence  # what mixes the tokens of a sequence in a layer


class Forwarded(NamedTuple):
    """The results of one step through the layers."""

    hidden: Float[Array, "T D"]  # before the final norm
    # Of each layer: pages with this step's K and V, or states behind it, which are Unsettled in a
    # step that verifies drafted tokens.
    written: tuple[Written, ...]
    # Tokens that each expert answered, per lane and layer with experts; None for models without.
    load: Int[Array, "A M E"] | None


def layer_axes(spec: ModelSpec, layer: int) -> dict:
    """Return parameter name -> axes of one layer; experts have a nested dict."""
    kind = spec.kinds[layer]
    if kind.own:
        raise ModelError(
            f"layer {layer} has its own {', '.join(kind.own)}; the decoder's layers have those of "
            f"the model"
        )
    axes = _mixer_axes(spec, kind) | dict.fromkeys(NORMS[spec.norms], "D")
    if spec.has_experts(layer):
        return axes | moe.axes(spec)
    biases = {"gate_up_bias": "CF", "down_bias": "D"} if spec.mlp_bias else {}
    return axes | {"gate_up": "DCF", "down": "FD"} | biases


def _mixer_axes(spec: ModelSpec, kind: LayerKind) -> dict[str, str]:
    """Return parameter name -> axes of a layer's attention, or of what it has in place of it."""
    if kind.state:
        is_convolution = isinstance(kind.state, ConvState)
        return dict(short_convolution.AXES if is_convolution else gated_delta.AXES)
    return latent.axes(spec, kind.latent) if kind.latent else attention.axes(spec)


def param_specs(
    spec: ModelSpec,
    dtype: jnp.dtype,
    scheme: QuantScheme | None = None,
    product: CpuProduct | None = None,
) -> dict:
    """Declare the parameters: "embed", "layers" (a dict for each), "norm", and "head" if any.

    Every leaf is a ParamSpec, or a Quantized for weights that the scheme quantizes. Weights that a
    CPU's kernel multiplies are a SummedLast of one of them. ModelError where the model cannot be
    quantized so.

    Args:
        product: How a CPU multiplies by them; None where XLA does.
    """
    specs: dict = {
        "embed": _spec(spec, "VD", dtype),
        "layers": [
            _specs(spec, layer_axes(spec, layer), dtype) for layer in range(spec.num_layers)
        ],
        "norm": _spec(spec, "D", dtype, "norm"),
    }
    if spec.has_head:
        specs["head"] = _spec(spec, "DV", dtype)
    if scheme:
        specs = quantized_specs(spec, specs, scheme)
    return summed_last_specs(specs, product) if product else specs


def kept_float32(spec: ModelSpec) -> frozenset[str]:
    """Return the names of parameters that are float32 whatever the dtype of the others."""
    of_mixture = spec.mixture.kept_float32 if spec.mixture else frozenset()
    is_delta = isinstance(spec.state, DeltaState)
    return of_mixture | gated_delta.KEPT_FLOAT32 if is_delta else of_mixture


def stored_float32(spec: ModelSpec) -> frozenset[str]:
    """Return the names of parameters that may be stored in float32 whatever the others are."""
    kept = kept_float32(spec)
    is_delta = isinstance(spec.state, DeltaState)
    return kept | gated_delta.STORED_FLOAT32 if is_delta else kept


def _specs(spec: ModelSpec, axes: dict, dtype: jnp.dtype, block: str = "") -> dict:
    specs: dict = {}
    for name, own in axes.items():
        if isinstance(own, dict):
            specs[name] = _specs(spec, own, dtype, block=name)
        else:
            specs[name] = _spec(spec, own, dtype, name, block)
    return specs


def _spec(
    spec: ModelSpec, axes: str, dtype: jnp.dtype, name: str = "", block: str = ""
) -> ParamSpec:
    shape = tuple(spec.sizes(block)[letter] for letter in axes)
    plain_norm = name == gated_delta.NORM or (name.endswith("norm") and not spec.norm_plus_one)
    mean = 1.0 if plain_norm else 0.0
    if name in kept_float32(spec):
        dtype = jnp.dtype(np.float32)
    return ParamSpec(axes, shape, dtype, mean)


def forward(
    params: dict,
    spec: ModelSpec,
    kept: tuple[Kept, ...],
    tokens: Int[Array, "T"],
    positions: Int[Array, "T"],
    mixers: tuple[Mixer, ...],
    experts: Experts | None = None,
) -> Forwarded:
    """Pass all of a step's tokens through the layers.

    Args:
        kept: Pages or states of each layer.
        mixers: Attention of each layer, or its recurrence; layers of a group share theirs.
        experts: Expert layers, for models that have experts.
    """
    x = params["embed"][tokens]
    if spec.embed_scale != 1:
        x = x * jnp.asarray(spec.embed_scale, x.dtype)  # rounded to x's dtype, as in training
    growth = spec.query_growth.factors(positions) if spec.query_growth else None
    rotation = Rotation(*tables(spec.rope, spec.rope_dim, positions), growth)
    in_window = (
        Rotation(*tables(spec.window_rope, spec.rope_dim, positions), growth)
        if spec.window_rope
        else rotation
    )
    written = list[Written]()
    loads = list[jax.Array]()
    for weights, own, mixer, kind in zip(params["layers"], kept, mixers, spec.kinds, strict=True):
        turn = rotation if kind.window is None else in_window
        if not kind.rope or kind.state:
            turn = None
        x, new, load = decoder_layer(weights, x, turn, mixer, own, experts, spec, kind)
        written.append(new)
        if load is not None:
            loads.append(load)
    return Forwarded(x, tuple(written), jnp.stack(loads, 1) if loads else None)


# A function of its own to the compiler: it is traced and lowered once for all layers that are
# alike, where each Pallas kernel would cost half a second a layer. XLA inlines its calls.
@partial(jax.jit, static_argnames=("spec", "kind"))
def decoder_layer(
    weights: dict,
    x: Float[Array, "T D"],
    rotation: Rotation | None,
    mixer: Mixer,
    kept: Kept,
    experts: Experts | None,
    spec: ModelSpec,
    kind: LayerKind,
) -> tuple[Float[Array, "T D"], Written, Int[Array, "A E"] | None]:
    """Pass all of a step's tokens through one layer.

    Args:
        weights: The layer's parameters by name, as layer_axes has them.
        rotation: None for a layer without a rope.
        mixer: Attention with `kept` pages, or a recurrence with `kept` states.
        experts: As in `forward`; a layer without experts does not use them.

    Returns:
        The hidden states, what is `written` of Forwarded, and for each lane how many tokens each
        expert answered, None for a layer without experts.
    """
    normed = _norm(spec, weights, "attn_norm", x)
    out, written = _mix(spec, kind, weights, normed, rotation, mixer, kept)
    x = x + _scaled(spec, _norm(spec, weights, "attn_out_norm", out))
    normed = _norm(spec, weights, "mlp_norm", x)
    load = None
    if experts and "experts" in weights:
        out, load = experts(weights, normed)
    else:
        out = gated_mlp(spec, weights, normed).astype(x.dtype)
    return x + _scaled(spec, _norm(spec, weights, "mlp_out_norm", out)), written, load


def _mix(
    spec: ModelSpec,
    kind: LayerKind,
    weights: dict,
    x: Float[Array, "T D"],
    rotation: Rotation | None,
    mixer: Mixer,
    kept: Kept,
) -> tuple[Float[Array, "T D"], Written]:
    """Apply the layer's attention, or what it has in place of it; see `decoder_layer`."""
    if isinstance(mixer, Recurrence):
        if isinstance(kind.state, ConvState):
            assert isinstance(kept, ConvStates)
            return short_convolution.short_convolution(kind.state, weights, x, mixer, kept)
        assert kind.state and isinstance(kept, DeltaStates)
        return gated_delta.gated_delta(spec, kind.state, weights, x, mixer, kept)
    assert isinstance(kept, Pages)
    if kind.latent:
        assert rotation
        return latent_attention(kind.latent, weights, x, rotation, mixer, kept)
    return self_attention(spec, weights, x, rotation, mixer, kept)


def _scaled(spec: ModelSpec, out: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """Multiply by the architecture's factor, which is not rounded to the dtype first."""
    if spec.residual_scale == 1:
        return out
    return (out.astype(jnp.float32) * spec.residual_scale).astype(out.dtype)


def _norm(spec: ModelSpec, weights: dict, name: str, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """Apply the layer's norm of this name; return x where the architecture has none there."""
    return norm(spec, x, weights[name]) if name in weights else x


def settled(written: tuple[Written, ...], counts: Int[Array, "A R"]) -> tuple[Kept, ...]:
    """Return what the layers keep once it is known how many tokens of each row count.

    Pages need nothing: what is written behind a row's length is overwritten later.
    """
    return tuple(
        _settled_layer(each, counts) if isinstance(each, Unsettled) else each for each in written
    )


# Traced and lowered once for all layers, see decoder_layer.
@jax.jit
def _settled_layer(unsettled: Unsettled, counts: Int[Array, "A R"]) -> LayerStates:
    return unsettled.settle(counts)


def logits(params: dict, spec: ModelSpec, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
    """Return float32 logits: final norm, head, divisor and soft cap."""
    normed = _norm(spec, params, "norm", hidden)
    if spec.tied_head:
        scores = einsum("RD,VD->RV", normed, _tied_head(params))
    else:
        scores = einsum("RD,DV->RV", normed, params["head"])
    if spec.logit_divisor != 1:
        scores = scores / spec.logit_divisor
    return softcap(scores, spec.final_softcap)


def _tied_head(params: dict) -> jax.Array | SummedLast:
    """Return the embedding as a head; it is stored with the dimension last that is summed over."""
    product = product_in(params)
    return SummedLast(params["embed"], 1, product) if product else params["embed"]


def embeddings(params: dict, spec: ModelSpec, hidden: Float[Array, "R D"]) -> Float[Array, "R D"]:
    """Return float32 embeddings: final norm, and every vector scaled to length 1."""
    normed = _norm(spec, params, "norm", hidden).astype(jnp.float32)
    return normed / jnp.maximum(jnp.linalg.norm(normed, axis=-1, keepdims=True), MIN_LENGTH)
