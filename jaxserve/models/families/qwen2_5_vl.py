"""Text parts of Qwen2-VL and Qwen2.5-VL: Qwen2, with M-RoPE, which is the plain rope for text."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import tensors
from jaxserve.models.families.qwen2 import upper_windows
from jaxserve.models.families.text_part import text_part
from jaxserve.models.families.weight_table import Family
from jaxserve.models.spec import ModelSpec

TEXT_V2 = "qwen2_vl_text"
TEXT_V2_5 = "qwen2_5_vl_text"
# Ids of the tokens that stand for images and video, or enclose them.
TOKENS = (
    *("image_token_id", "video_token_id", "vision_token_id"),
    *("vision_start_token_id", "vision_end_token_id"),
)


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("hidden_act", "silu")
    read.ignore(*TOKENS)  # transformers writes them among the text part's fields as well
    spec = ModelSpec(
        family="qwen2_5_vl",
        layers=upper_windows(read, read.integer("num_hidden_layers"), first=80),
        qkv_bias=True,
        **read.llama_like(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6),
    )
    read.finish()
    return spec


TEXT = Family(spec_from_hf, tensors)
# Published files have the fields of the text part beside those of the whole model.
V2 = text_part({TEXT_V2: TEXT}, ("visual",), *TOKENS, flat=TEXT_V2, ties_inside=True)
V2_5 = text_part({TEXT_V2_5: TEXT}, ("visual",), *TOKENS, flat=TEXT_V2_5, ties_inside=True)
