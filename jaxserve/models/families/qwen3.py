"""Qwen3, dense: Llama's names, with a norm on every query and key head."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import tensors
from jaxserve.models.families.qwen2 import upper_windows
from jaxserve.models.families.weight_table import Family
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    heads = read.integer("num_attention_heads")
    layers, bias = read.integer("num_hidden_layers"), read.take("attention_bias", False, kind=bool)
    read.expect("hidden_act", "silu")
    spec = ModelSpec(
        family="qwen3",
        vocab_size=read.integer("vocab_size"),
        d_model=read.integer("hidden_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.kv_heads(heads, 32),
        head_dim=read.integer("head_dim", 128),
        d_mlp=read.integer("intermediate_size"),
        norm_eps=float(read.take("rms_norm_eps", 1e-6)),
        max_positions=read.integer("max_position_embeddings"),
        rope=read.rope(default_theta=10000.0),
        windows=upper_windows(read, layers),
        tied_head=read.take("tie_word_embeddings", False, kind=bool),
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
    )
    read.finish()
    return spec


FAMILY = Family(spec_from_hf, tensors)
