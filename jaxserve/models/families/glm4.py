"""GLM-4, GLM-4-0414 and GLM-4.1V: half of a head rotated in neighbouring pairs, fused gate_up."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from jaxserve.models.families import hf_names
from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.text_part import text_part
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.spec import ModelSpec

# Ids of the tokens that stand for images and video, or enclose them.
IMAGE_IDS = (
    *("image_token_id", "image_start_token_id", "image_end_token_id"),
    *("video_token_id", "video_start_token_id", "video_end_token_id"),
)
NORMS_AROUND = {
    "input_layernorm": "attn_norm",
    "post_self_attn_layernorm": "attn_out_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_mlp_layernorm": "mlp_out_norm",
}


def glm_spec(config: Mapping[str, Any]) -> ModelSpec:
    return _spec(ConfigReader(config), "glm", "before", 0.5, head_dim=128, rms_norm_eps=1.5625e-7)


def glm4_spec(config: Mapping[str, Any]) -> ModelSpec:
    return _spec(ConfigReader(config), "glm4", "around", 0.5, head_dim=128, rms_norm_eps=1.5625e-7)


def glm4v_spec(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("attention_bias", True)
    return _spec(read, "glm4v", "around", 1.0, rms_norm_eps=1e-5)


def _spec(
    read: ConfigReader,
    family: str,
    norms: Literal["before", "around"],
    rotated: float,
    **defaults: Any,
) -> ModelSpec:
    """Read the fields that these families share.

    Args:
        norms: As in ModelSpec.
        rotated: Share of a head that is rotated, where config.json does not say it.
        **defaults: Defaults of the family for other absent fields.
    """
    read.expect("hidden_act", "silu")
    rotated = read.positive("partial_rotary_factor", rotated)
    spec = ModelSpec(
        family=family,
        norms=norms,
        qkv_bias=read.take("attention_bias", True, kind=bool),
        **read.llama_like(
            num_key_value_heads=2,
            rope=read.rope(10000.0, beside={"partial_rotary_factor": rotated}),
            **defaults,
        ),
    )
    read.finish()
    return spec


def tensors(norms: Mapping[str, str], spec: ModelSpec) -> list[Tensor]:
    """Return the weight table; `norms` are parameters by their names in the checkpoint."""
    rows = hf_names.neighbours(spec, hf_names.tensors(spec, norms))
    return [_fused(row) for row in rows]


def _fused(row: Tensor) -> Tensor:
    """Return the row of a gate or an up as its part of the tensor that holds both."""
    own = str(row.path[-1])
    if own not in ("gate", "up"):
        return row
    name = row.name.replace(f"{own}_proj", "gate_up_proj")
    return Tensor(name, row.path, "([F|F])D", part=("gate", "up").index(own))


GLM = Family(glm_spec, partial(tensors, hf_names.PRE_NORMS))
GLM4 = Family(glm4_spec, partial(tensors, NORMS_AROUND))
GLM4V = text_part(
    {"glm4v_text": replace(GLM4, spec_from_hf=glm4v_spec)},
    ("visual",),
    *IMAGE_IDS,
    flat="glm4v_text",
    ties_inside=True,
)
