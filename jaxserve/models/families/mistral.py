"""Mistral 7B and what shares its config: Llama with a sliding window over every layer (from v0.2 on
without).
"""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import tensors
from jaxserve.models.families.weight_table import Family, without_frequencies
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    heads, d_model = read.integer("num_attention_heads"), read.integer("hidden_size")
    layers = read.integer("num_hidden_layers")
    read.expect("hidden_act", "silu")
    spec = ModelSpec(
        family="mistral",
        vocab_size=read.integer("vocab_size"),
        d_model=d_model,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.kv_heads(heads, 8),
        head_dim=read.integer("head_dim", d_model // heads),
        d_mlp=read.integer("intermediate_size"),
        norm_eps=float(read.take("rms_norm_eps", 1e-6)),
        max_positions=read.integer("max_position_embeddings"),
        rope=read.rope(default_theta=10000.0),
        windows=(read.window(default=4096),) * layers,
        tied_head=read.take("tie_word_embeddings", False, kind=bool),
    )
    read.finish()
    return spec


FAMILY = Family(spec_from_hf, tensors, without_frequencies)
