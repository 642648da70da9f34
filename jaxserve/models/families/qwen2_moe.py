"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and beside them a gated MLP that all tokens
take."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.models.families.hf_config import FULL, ConfigReader
from jaxserve.models.families.hf_names import expert_tensors, layer_tensors, tensors
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.spec import Mixture, ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    heads, d_model = read.integer("num_attention_heads"), read.integer("hidden_size")
    layers = read.integer("num_hidden_layers")
    read.expect("hidden_act", "silu")
    spec = ModelSpec(
        family="qwen2_moe",
        vocab_size=read.integer("vocab_size"),
        d_model=d_model,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.kv_heads(heads, 16),
        head_dim=read.integer("head_dim", d_model // heads),
        d_mlp=read.integer("intermediate_size"),
        norm_eps=float(read.take("rms_norm_eps", 1e-6)),
        max_positions=read.integer("max_position_embeddings"),
        rope=read.rope(default_theta=10000.0),
        windows=no_windows(read, layers),
        tied_head=read.take("tie_word_embeddings", False, kind=bool),
        qkv_bias=read.take("qkv_bias", True, kind=bool),
        mixture=mixture(
            read, layers, d_shared=read.integer("shared_expert_intermediate_size"), shared_gate=True
        ),
    )
    read.finish()
    return spec


def no_windows(read: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """Which layers would have one is another matter in each version of transformers, and no
    published one is in use.
    """
    read.expect("use_sliding_window", False)
    read.ignore("sliding_window", "max_window_layers")
    return read.windows(None, [FULL] * layers)


def mixture(read: ConfigReader, layers: int, **more: Any) -> Mixture:
    """What Qwen's mixtures read alike. Every decoder_sparse_step-th layer has experts but for
    mlp_only_layers.
    """
    read.ignore("router_aux_loss_coef", "output_router_logits")  # of training
    step, without = (
        read.integer("decoder_sparse_step", 1),
        read.take("mlp_only_layers", [], kind=list),
    )
    return Mixture(
        experts=read.either("num_experts", "num_local_experts"),  # transformers 5 writes the latter
        taken=read.integer("num_experts_per_tok"),
        d_expert=read.integer("moe_intermediate_size"),
        layers=tuple(
            layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in without
        ),
        normalized=read.take("norm_topk_prob", False, kind=bool),
        **more,
    )


def qwen2_moe_tensors(spec: ModelSpec) -> list[Tensor]:
    return tensors(spec, experts=partial(_experts, spec))


def _experts(spec: ModelSpec, layer: int) -> list[Tensor]:
    gate = layer_tensors(layer, {"mlp.shared_expert_gate.weight": ("shared_gate", "()D")})
    return expert_tensors(spec, layer, shared="shared_expert") + gate


FAMILY = Family(spec_from_hf, qwen2_moe_tensors)
