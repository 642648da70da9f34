"""Mistral 7B, Ministral 8B and models that share their config: Llama with a sliding window.

Ministral has it in the layers that layer_types names, versions of Mistral from 0.2 on in none.
"""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families import ministral3
from jaxserve.models.families.hf_config import FULL, SLIDING, ConfigReader
from jaxserve.models.families.hf_names import tensors
from jaxserve.models.families.text_part import text_part
from jaxserve.models.families.weight_table import Family, without_frequencies
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("hidden_act", "silu")
    layers = read.integer("num_hidden_layers")
    window = read.window(default=4096)
    spec = ModelSpec(
        family="mistral",
        layers=read.layers(window, [SLIDING if window else FULL] * layers),
        **read.llama_like(num_key_value_heads=8),
    )
    read.finish()
    return spec


FAMILY = Family(spec_from_hf, tensors, without_frequencies)
WITH_IMAGES = text_part(
    {"mistral": FAMILY, "ministral3": ministral3.FAMILY},
    ("vision_tower", "multi_modal_projector"),
    *("image_token_index", "image_token_id", "projector_hidden_act", "spatial_merge_size"),
    *("multimodal_projector_bias", "vision_feature_layer"),
)
