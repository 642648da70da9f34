"""Qwen3-MoE: Qwen3 with experts."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import expert_tensors, tensors
from jaxserve.models.families.qwen2_moe import listed_windows, mixture
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.layer_kind import LayerKind
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("hidden_act", "silu")
    read.no_dual_chunks()
    # Fields of Qwen3-Coder-480B.
    read.expect("qkv_bias", False)
    read.expect("use_qk_norm", True)
    read.expect("shared_expert_intermediate_size", 0)
    layers = read.integer("num_hidden_layers")
    bias = read.take("attention_bias", False, kind=bool)
    spec = ModelSpec(
        family="qwen3_moe",
        layers=_windows(read, layers),
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
        mixture=mixture(read, layers),
        **read.llama_like(num_key_value_heads=4),
    )
    read.finish()
    return spec


def _windows(read: ConfigReader, layers: int) -> tuple[LayerKind, ...]:
    """Return the kind of every layer, all of which have a window or none has one."""
    kinds = listed_windows(read, layers)
    if len(set(kinds)) > 1:
        raise ModelError(
            "config.json: layer_types has a window in some layers; implemented is all or none"
        )
    return kinds


def qwen3_moe_tensors(spec: ModelSpec) -> list[Tensor]:
    return tensors(spec, experts=partial(expert_tensors, spec))


FAMILY = Family(spec_from_hf, qwen3_moe_tensors)
