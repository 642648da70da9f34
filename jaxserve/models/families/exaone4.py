"""EXAONE 4 and 4.5: norms behind attention and MLP, and no rope in layers without a window."""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models.families import olmo2
from jaxserve.models.families.hf_config import FULL, SLIDING, ConfigReader
from jaxserve.models.families.qwen2_5_vl import TOKENS
from jaxserve.models.families.text_part import text_part
from jaxserve.models.families.weight_table import Family
from jaxserve.models.layer_kind import LayerKind
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("hidden_act", "silu")
    # Layers that propose tokens are not loaded.
    read.ignore("num_nextn_predict_layers", "_num_mtp_layers", "mtp_share_layers")
    read.ignore("mtp_loss_scaling_factor")
    spec = ModelSpec(
        family="exaone4",
        norms="after",
        qk_norm="head",
        layers=_layers(read, read.integer("num_hidden_layers")),
        **read.llama_like(num_key_value_heads=32, rms_norm_eps=1e-5),
    )
    read.finish()
    return spec


def _layers(read: ConfigReader, layers: int) -> tuple[LayerKind, ...]:
    """Return the kind of every layer: with a window, or without a window and a rope.

    A model without windows has ropes everywhere.
    """
    window = read.window(default=4096)
    if window is None:
        read.ignore("sliding_window_pattern")
        return read.layers(None, [FULL] * layers)
    kinds = read.layers(window, _pattern(read, layers))
    return tuple(kind if kind.window else LayerKind(rope=False) for kind in kinds)


def _pattern(read: ConfigReader, layers: int) -> list[str]:
    """Return the kinds of layers by the number of those of which one has no window.

    Published files have layer_types as well, and then letters in place of that number.
    """
    if read.has("layer_types"):
        read.ignore("sliding_window_pattern")
        return []
    if read.nullable("sliding_window_pattern", 4) is None:
        raise ModelError("config.json: sliding_window_pattern is null beside a sliding_window")
    interval = read.integer("sliding_window_pattern", 4)
    return [SLIDING if (layer + 1) % interval else FULL for layer in range(layers)]


FAMILY = Family(spec_from_hf, olmo2.tensors)
# Of EXAONE 4.5; `mtp` are layers that propose tokens.
WITH_IMAGES = text_part({"exaone4_5_text": FAMILY, "exaone4": FAMILY}, ("visual", "mtp"), *TOKENS)
