"""Llama 2, 3, 3.1 and 3.2, and models that share their config and tensor names."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import tensors
from jaxserve.models.families.weight_table import Family, without_frequencies
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("hidden_act", "silu")
    read.expect("rope_interleaved", False)
    read.ignore("is_llama_config")  # set in SmolLM2's config.json
    read.ignore("pretraining_tp")  # how training split a matrix product: the result is the same
    bias = read.take("attention_bias", False, kind=bool)
    spec = ModelSpec(
        family="llama",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=read.take("mlp_bias", False, kind=bool),
        **read.llama_like(),
    )
    read.finish()
    return spec


FAMILY = Family(spec_from_hf, tensors, without_frequencies)
