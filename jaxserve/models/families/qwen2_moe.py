"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and a gated MLP beside them for all tokens."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models.families.hf_config import FULL, ConfigReader
from jaxserve.models.families.hf_names import expert_tensors, layer_tensors, tensors
from jaxserve.models.families.typed_fields import shown
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.layer_kind import LayerKind
from jaxserve.models.mixture import Mixture
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("hidden_act", "silu")
    read.no_dual_chunks()
    layers = read.integer("num_hidden_layers")
    d_shared = read.integer("shared_expert_intermediate_size")
    spec = ModelSpec(
        family="qwen2_moe",
        layers=listed_windows(read, layers),
        qkv_bias=read.take("qkv_bias", True, kind=bool),
        mixture=mixture(read, layers, d_shared=d_shared, shared_gate=True),
        **read.llama_like(num_key_value_heads=16),
    )
    read.finish()
    return spec


def listed_windows(read: ConfigReader, layers: int) -> tuple[LayerKind, ...]:
    """Return the kind of every layer: windows in use are those that layer_types lists.

    ModelError where config.json uses windows without a list: versions of transformers disagree
    about which layers have one then.
    """
    in_use = read.take("use_sliding_window", False, kind=bool)
    read.ignore("sliding_window", "max_window_layers")
    if in_use and not read.has("layer_types"):
        raise ModelError(
            "config.json: use_sliding_window without layer_types is not implemented (add "
            "layer_types, which says of each layer whether it has the window)"
        )
    return read.layers(read.window() if in_use else None, [FULL] * layers)


def mixture(
    read: ConfigReader, layers: int, *, norm_topk_prob: bool = False, **more: Any
) -> Mixture:
    """Read the fields that Qwen's mixtures share.

    Every decoder_sparse_step-th layer has experts, except for mlp_only_layers.

    Args:
        norm_topk_prob: Default of the family for an absent field.
        **more: Further fields of the Mixture.
    """
    read.ignore("router_aux_loss_coef", "output_router_logits")  # only training uses them
    step = read.integer("decoder_sparse_step", 1)
    without = _layers_without_experts(read)
    return Mixture(
        experts=read.either("num_experts", "num_local_experts"),  # transformers 5 writes the latter
        taken=read.integer("num_experts_per_tok"),
        d_expert=read.integer("moe_intermediate_size"),
        layers=tuple(
            layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in without
        ),
        normalized=read.take("norm_topk_prob", norm_topk_prob, kind=bool),
        **more,
    )


def _layers_without_experts(read: ConfigReader) -> list[int]:
    listed = read.take("mlp_only_layers", [], kind=list)
    if any(type(layer) is not int or layer < 0 for layer in listed):
        problem = f"mlp_only_layers is {shown(listed)}; it must list layers, from 0"
        raise ModelError(f"config.json: {problem}")
    return listed


def qwen2_moe_tensors(spec: ModelSpec) -> list[Tensor]:
    return tensors(spec, experts=partial(separate_experts, spec))


def separate_experts(spec: ModelSpec, layer: int) -> list[Tensor]:
    """Return the rows of a layer's experts, each with tensors of its own, and of the shared MLP."""
    return expert_tensors(spec, layer, shared="shared_expert") + shared_gate(layer)


def shared_gate(layer: int) -> list[Tensor]:
    """Return the row of the gate of the MLP that all tokens take."""
    return layer_tensors(layer, {"mlp.shared_expert_gate.weight": ("shared_gate", "()D")})


FAMILY = Family(spec_from_hf, qwen2_moe_tensors)
