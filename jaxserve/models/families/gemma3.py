"""Gemma 3, text: one layer in six without a window, a rope for each kind, norms of q and k."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.gemma2 import gemma_fields, gemma_tensors, softcap
from jaxserve.models.families.hf_config import FULL, SLIDING, ConfigReader
from jaxserve.models.families.hf_rope import theta_of
from jaxserve.models.families.text_part import text_part
from jaxserve.models.families.weight_table import Family
from jaxserve.models.rope import Rope
from jaxserve.models.spec import ModelSpec

# Defaults of Gemma3TextConfig in transformers for fields that published text parts leave out.
DEFAULTS = {
    "vocab_size": 262208,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "max_position_embeddings": 131072,
}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader({**DEFAULTS, **config})
    read.expect("attn_logit_softcapping", None)
    layers = read.integer("num_hidden_layers")
    pattern = read.integer("sliding_window_pattern", read.integer("_sliding_window_pattern", 6))
    kinds = [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]
    spec = ModelSpec(
        family="gemma3",
        window_rope=_window_rope(read),
        layers=read.layers(read.window(default=4096), kinds),
        qk_norm="head",
        final_softcap=softcap(read, "final_logit_softcapping", None),
        **gemma_fields(read, read.rope(default_theta=1e6, layers=FULL)),
    )
    read.finish()
    return spec


def _window_rope(read: ConfigReader) -> Rope:
    """Read the rope of layers with a window.

    Newer files have its own rope_parameters; older ones a theta beside that of the other layers.
    """
    theta = theta_of(read, "rope_local_base_freq", 10000.0)
    if SLIDING in read.object("rope_parameters"):
        return read.rope(default_theta=theta, layers=SLIDING)
    return Rope(theta)


FAMILY = Family(spec_from_hf, gemma_tensors)
WITH_IMAGES = text_part(
    {"gemma3_text": FAMILY},
    ("vision_tower", "multi_modal_projector"),
    *("image_token_index", "image_token_id", "mm_tokens_per_image"),
    *("boi_token_index", "boi_token_id", "eoi_token_index", "eoi_token_id"),
)
