"""GLM-4.5 to 4.7, 4.5V and 4.6V: DeepSeek-V3's experts, and half of a head rotated."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxserve.models.families import deepseek
from jaxserve.models.families.glm4 import IMAGE_IDS
from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import tensors
from jaxserve.models.families.text_part import text_part
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.mixture import Mixture
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    is_normed = read.take("use_qk_norm", False, kind=bool)
    has_bias = read.take("attention_bias", False, kind=bool)
    return _spec(read, "glm4_moe", qk_norm="head" if is_normed else "none", qkv_bias=has_bias)


def with_images_spec(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("use_qk_norm", False)
    read.expect("qk_layernorm", False)
    read.ignore("router_aux_loss_coef")  # only training uses it
    return _spec(read, "glm4v_moe", qkv_bias=read.take("attention_bias", True, kind=bool))


def _spec(read: ConfigReader, family: str, **attention: Any) -> ModelSpec:
    """Read the fields that both families share."""
    read.expect("hidden_act", "silu")
    read.ignore("output_router_logits")  # only training uses it
    # Layers that propose tokens are not loaded.
    read.ignore("num_nextn_predict_layers", "num_mtp_layers")
    rotated = read.positive("partial_rotary_factor", 0.5)
    fields = read.llama_like(
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope=read.rope(10000.0, beside={"partial_rotary_factor": rotated}),
    )
    mixture = _mixture(read, fields["num_layers"])
    spec = ModelSpec(family=family, mixture=mixture, **attention, **fields)
    read.finish()
    return spec


def _mixture(read: ConfigReader, layers: int) -> Mixture | None:
    """Read the fields of experts; None where every layer is dense."""
    dense = read.count("first_k_dense_replace", 1)
    routing = deepseek.corrected_routing(read, scale=1.0, groups=1, groups_taken=1)
    d_expert = read.integer("moe_intermediate_size", 1408)
    experts = read.either("n_routed_experts", "num_local_experts")
    taken = read.integer("num_experts_per_tok", 8)
    shared = read.integer("n_shared_experts", 1)
    if dense >= layers:
        return None
    return Mixture(
        experts=experts,
        taken=taken,
        d_expert=d_expert,
        layers=tuple(range(dense, layers)),
        d_shared=d_expert * shared,
        router_float32=True,
        **routing,
    )


def glm4_moe_tensors(spec: ModelSpec) -> list[Tensor]:
    return tensors(spec, experts=partial(deepseek.experts, spec))


FAMILY = Family(spec_from_hf, glm4_moe_tensors, deepseek.ignored)
WITH_IMAGES = text_part(
    {"glm4v_moe_text": replace(FAMILY, spec_from_hf=with_images_spec)},
    ("visual",),
    *IMAGE_IDS,
    ties_inside=True,
)
