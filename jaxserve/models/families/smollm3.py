"""SmolLM3: Llama with layers that have no rope, by default every fourth (Yang et al. 2025)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models.families.hf_config import FULL, SLIDING, ConfigReader
from jaxserve.models.families.hf_names import tensors
from jaxserve.models.families.typed_fields import shown
from jaxserve.models.families.weight_table import Family
from jaxserve.models.layer_kind import LayerKind
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("hidden_act", "silu")
    read.ignore("pretraining_tp")  # how training split a matrix product: the result is the same
    bias = read.take("attention_bias", False, kind=bool)
    spec = ModelSpec(
        family="smollm3",
        layers=_layers(read, read.integer("num_hidden_layers")),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=read.take("mlp_bias", False, kind=bool),
        **read.llama_like(num_key_value_heads=4, rope_theta=2e6, tie_word_embeddings=True),
    )
    read.finish()
    return spec


def _layers(read: ConfigReader, layers: int) -> tuple[LayerKind, ...]:
    """Return the kind of every layer: those without a rope may have a window."""
    ropes = _ropes(read, layers)
    in_use = read.take("use_sliding_window", False, kind=bool)
    read.ignore("sliding_window", "max_window_layers")
    window = read.window() if in_use else None
    kinds = read.layers(window, [SLIDING if window and not rope else FULL for rope in ropes])
    return tuple(replace(kind, rope=rope) for kind, rope in zip(kinds, ropes, strict=True))


def _ropes(read: ConfigReader, layers: int) -> list[bool]:
    """Return which layers have a rope; no_rope_layers has 1 for those that have one."""
    interval = read.integer("no_rope_layer_interval", 4)
    flags = read.take(
        "no_rope_layers", [int((layer + 1) % interval != 0) for layer in range(layers)], kind=list
    )
    if len(flags) < layers or any(flag not in (0, 1) for flag in flags):
        raise ModelError(
            f"config.json: no_rope_layers is {shown(flags)}; it must have a 0 or 1 for each of "
            f"{layers} layers"
        )
    return [bool(flag) for flag in flags[:layers]]


FAMILY = Family(spec_from_hf, tensors)
