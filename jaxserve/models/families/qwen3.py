"""Qwen3, dense: Qwen2 with a norm on every query and key head, and no fixed biases."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import tensors
from jaxserve.models.families.qwen2 import upper_windows
from jaxserve.models.families.weight_table import Family
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("hidden_act", "silu")
    read.no_dual_chunks()
    bias = read.take("attention_bias", False, kind=bool)
    spec = ModelSpec(
        family="qwen3",
        layers=upper_windows(read, read.integer("num_hidden_layers")),
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
        **read.llama_like(num_key_value_heads=32, head_dim=128),
    )
    read.finish()
    return spec


FAMILY = Family(spec_from_hf, tensors)
