"""Llama 2, 3, 3.1, 3.2, and what shares their config and names."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import tensors
from jaxserve.models.families.weight_table import Family, without_frequencies
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    heads, d_model = read.integer("num_attention_heads"), read.integer("hidden_size")
    bias = read.take("attention_bias", False, kind=bool)
    read.expect("hidden_act", "silu")
    read.expect("rope_interleaved", False)
    read.ignore("is_llama_config")  # SmolLM2 says what it is
    read.ignore("pretraining_tp")  # how a matrix product was split in training: the same product
    spec = ModelSpec(
        family="llama",
        vocab_size=read.integer("vocab_size"),
        d_model=d_model,
        num_layers=read.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=read.kv_heads(heads),
        head_dim=read.integer("head_dim", d_model // heads),
        d_mlp=read.integer("intermediate_size"),
        norm_eps=float(read.take("rms_norm_eps", 1e-6)),
        max_positions=read.integer("max_position_embeddings"),
        rope=read.rope(default_theta=10000.0),
        tied_head=read.take("tie_word_embeddings", False, kind=bool),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=read.take("mlp_bias", False, kind=bool),
    )
    read.finish()
    return spec


FAMILY = Family(spec_from_hf, tensors, without_frequencies)
