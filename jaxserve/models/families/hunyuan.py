"""Hunyuan V1, dense and with experts: norms of queries and keys after their rotation."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models.families import hf_names
from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import expert_tensors
from jaxserve.models.families.hf_rope import theta_of
from jaxserve.models.families.typed_fields import MAX_COUNTS, MAX_SIZE, Fields, shown
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.mixture import Mixture
from jaxserve.models.rope import NtkRope, Rope
from jaxserve.models.spec import ModelSpec

# Fields of a rope with alpha. The last four are in published files, and nothing reads them.
ALPHA_ROPE = frozenset(
    "type rope_type rope_theta alpha factor beta_fast beta_slow mscale mscale_all_dim".split()
)
# Names of parameters of hf_names.py that differ in the checkpoints.
NAMES = {
    ".self_attn.q_norm.": ".self_attn.query_layernorm.",
    ".self_attn.k_norm.": ".self_attn.key_layernorm.",
    ".mlp.gate.weight": ".mlp.gate.wg.weight",
}
# Fields of towers and heads that these checkpoints do not have, and ids of tokens.
OTHER_TASKS = tuple(
    """
    anyres_pooling_size anyres_vit_max_image_size anyres_vit_two_views class_num dense_list
    eod_token_id im_end_id im_newline_id im_start_id image_token_id mask_init_id num_media_embeds
    org_vocab_size pad_id pool_type pretraining_tp sep_token_id skip_cls_token text_end_id
    text_start_id video_end_id video_start_id vit_add_patchemb_bias vit_input_resolution
    vit_mapping_type vit_norm_type vit_patch vit_path vit_remove_prenorm vit_token vit_type
    vit_used_rms_norm
    """.split()
)


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    spec = ModelSpec(family="hunyuan_v1_dense", **_fields(read))
    read.finish()
    return spec


def moe_spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("use_mixed_mlp_moe", True)
    read.expect("moe_layer_num_skipped", 0)
    read.expect("norm_topk_prob", True)
    read.expect("routed_scaling_factor", 1.0)
    read.expect("group_limited_greedy", False)
    read.expect("n_group", None)
    read.expect("topk_group", None)
    # Fields that only training uses.
    read.ignore("moe_drop_tokens", "moe_random_routing_dropped_token", "output_router_logits")
    fields = _fields(read)
    layers = fields["num_layers"]
    d_expert = _of_all_layers(read, "moe_intermediate_size", fields["d_mlp"], layers)
    shared = _of_all_layers(read, "num_shared_expert", 1, layers)
    spec = ModelSpec(
        family="hunyuan_v1_moe",
        mixture=Mixture(
            experts=_of_all_layers(read, "num_experts", 1, layers),
            taken=_of_all_layers(read, "moe_topk", 1, layers),
            d_expert=d_expert,
            layers=tuple(range(layers)),
            d_shared=d_expert * shared,
            router_float32=True,
        ),
        **fields,
    )
    read.finish()
    return spec


def _fields(read: ConfigReader) -> dict[str, Any]:
    """Read the fields that models with and without experts share."""
    read.expect("hidden_act", "silu")
    read.expect("norm_type", "rms")
    read.expect("mlp_bias", False)
    read.expect("use_qk_norm", True)
    read.expect("use_rotary_pos_emb", True)
    read.expect("position_embedding_xdrope", False)
    read.expect("xdrope_section", None)
    read.expect("use_cla", False)  # layers that share keys and values
    read.ignore("cla_share_factor")
    read.expect("use_mla", False)  # latent attention, whose sizes are null
    sizes = ("q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim")
    for name in sizes:
        read.expect(name, None)
    read.expect("add_classification_head", False)
    read.ignore(*OTHER_TASKS)
    bias = read.take("attention_bias", False, kind=bool)
    fields = read.llama_like(rms_norm_eps=1e-5, rope=_rope(read))
    if read.integer("attention_head_dim", fields["head_dim"]) != fields["head_dim"]:
        raise ModelError("config.json: attention_head_dim and head_dim have to be the same")
    return fields | dict(qk_norm="head", qk_norm_after_rope=True, qkv_bias=bias, out_bias=bias)


def _rope(read: ConfigReader) -> Rope:
    """Read the rope, whose dynamic scaling by alpha is the same for all lengths."""
    fields = read.object("rope_scaling") | read.object("rope_parameters")
    kind = fields.get("rope_type") or fields.get("type")
    if kind != "dynamic" or fields.get("alpha") is None:
        return read.rope(10000.0)
    inside = Fields(fields, "the rope of type 'dynamic'", known=ALPHA_ROPE)
    inside.expect("factor", 1.0)
    inside.finish()
    theta = theta_of(inside, "rope_theta", theta_of(read, "rope_theta", 10000.0))
    return NtkRope(theta, alpha=inside.positive("alpha", 1.0))


def _of_all_layers(read: ConfigReader, name: str, default: int, layers: int) -> int:
    """Return an integer that config.json has once, or once for each layer."""
    value = read.take(name, default, kind=(int, list))
    if isinstance(value, int):
        return read.integer(name, default)
    alike = bool(value) and type(value[0]) is int and all(each == value[0] for each in value)
    if not alike or len(value) < layers or not 1 <= value[0] <= MAX_COUNTS.get(name, MAX_SIZE):
        raise ModelError(
            f"config.json: {name} is {shown(value)}; implemented is one number for all {layers} "
            "layers"
        )
    return value[0]


def dense_tensors(spec: ModelSpec) -> list[Tensor]:
    return hf_names.renamed(hf_names.tensors(spec), NAMES)


def moe_tensors(spec: ModelSpec) -> list[Tensor]:
    experts = partial(expert_tensors, spec, shared="shared_mlp")
    return hf_names.renamed(hf_names.tensors(spec, experts=experts), NAMES)


DENSE = Family(spec_from_hf, dense_tensors)
MOE = Family(moe_spec_from_hf, moe_tensors)
