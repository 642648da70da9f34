"""Gemma: Llama with a scaled embedding, and norms that multiply by 1 + weight."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import tensors
from jaxserve.models.families.weight_table import Family
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    # Published files say gelu, and mean the tanh approximation; transformers reads it so, too.
    read.expect("hidden_act", "gelu_pytorch_tanh", "gelu")
    read.expect("hidden_activation", "gelu_pytorch_tanh", None)
    read.expect("use_bidirectional_attention", False, None)
    bias = read.take("attention_bias", False, kind=bool)
    fields = read.llama_like(
        hidden_size=3072,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=256,
        tie_word_embeddings=True,
    )
    spec = ModelSpec(
        family="gemma",
        qkv_bias=bias,
        out_bias=bias,
        norm_plus_one=True,
        activation="gelu_tanh",
        embed_scale=fields["d_model"] ** 0.5,
        **fields,
    )
    read.finish()
    return spec


FAMILY = Family(spec_from_hf, tensors)
