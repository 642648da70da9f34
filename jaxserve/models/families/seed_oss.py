"""Seed-OSS: Llama with biases on q, k and v, and heads of a size of their own."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import tensors
from jaxserve.models.families.weight_table import Family
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("hidden_act", "silu")
    read.ignore("residual_dropout", "pretraining_tp")  # only training uses them
    spec = ModelSpec(
        family="seed_oss",
        qkv_bias=read.take("attention_bias", True, kind=bool),
        out_bias=read.take("attention_out_bias", False, kind=bool),
        mlp_bias=read.take("mlp_bias", False, kind=bool),
        **read.llama_like(num_key_value_heads=8, head_dim=128),
    )
    read.finish()
    return spec


FAMILY = Family(spec_from_hf, tensors)
