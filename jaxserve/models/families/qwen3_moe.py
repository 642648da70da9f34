"""Qwen3-MoE: Qwen3 with experts."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import expert_tensors, tensors
from jaxserve.models.families.qwen2_moe import mixture, no_windows
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    heads, d_model = read.integer("num_attention_heads"), read.integer("hidden_size")
    layers, bias = read.integer("num_hidden_layers"), read.take("attention_bias", False, kind=bool)
    read.expect("hidden_act", "silu")
    spec = ModelSpec(
        family="qwen3_moe",
        vocab_size=read.integer("vocab_size"),
        d_model=d_model,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.kv_heads(heads, 4),
        head_dim=read.integer("head_dim", d_model // heads),
        d_mlp=read.integer("intermediate_size"),
        norm_eps=float(read.take("rms_norm_eps", 1e-6)),
        max_positions=read.integer("max_position_embeddings"),
        rope=read.rope(default_theta=10000.0),
        windows=no_windows(read, layers),
        tied_head=read.take("tie_word_embeddings", False, kind=bool),
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
        mixture=mixture(read, layers),
    )
    read.finish()
    return spec


def qwen3_moe_tensors(spec: ModelSpec) -> list[Tensor]:
    return tensors(spec, experts=partial(expert_tensors, spec))


FAMILY = Family(spec_from_hf, qwen3_moe_tensors)
