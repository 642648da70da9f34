"""Text part of Kimi K2.5 to K2.7: DeepSeek-V3, whose own config may be quantized."""

from jaxserve.models.families import deepseek
from jaxserve.models.families.text_part import text_part

WITH_IMAGES = text_part(
    {"kimi_k2": deepseek.V3, "deepseek_v3": deepseek.V3},
    ("vision_tower", "mm_projector", "multi_modal_projector"),
    *("ignore_index", "media_placeholder_token_id", "use_unified_vision_chunk"),
    *("video_placeholder", "image_token_id", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id"),
    *("projection_hidden_size", "projection_layer_norm_eps"),
)
