"""Qwen2 and Qwen2.5, dense: Llama with biases on q, k and v, and an optional sliding window."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.hf_config import FULL, SLIDING, ConfigReader
from jaxserve.models.families.hf_names import tensors
from jaxserve.models.families.weight_table import Family
from jaxserve.models.layer_kind import LayerKind
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("hidden_act", "silu")
    read.no_dual_chunks()
    read.expect("use_mrope", False)
    spec = ModelSpec(
        family="qwen2",
        layers=upper_windows(read, read.integer("num_hidden_layers")),
        qkv_bias=True,
        **read.llama_like(),
    )
    read.finish()
    return spec


def upper_windows(read: ConfigReader, layers: int, first: int = 28) -> tuple[LayerKind, ...]:
    """Return the kind of every layer: the layers from max_window_layers on may have one.

    Without use_sliding_window the fields that describe windows mean nothing, and published configs
    have them all the same.

    Args:
        first: Default of the family for an absent max_window_layers.
    """
    in_use = read.take("use_sliding_window", False, kind=bool)
    read.ignore("sliding_window", "max_window_layers")
    window = read.window(default=4096) if in_use else None
    lowest = read.take("max_window_layers", first, kind=int) if window else layers
    return read.layers(window, [SLIDING if layer >= lowest else FULL for layer in range(layers)])


FAMILY = Family(spec_from_hf, tensors)
