"""Qwen3.5 to 3.8, dense and with experts, alone and as text parts: Qwen3-Next with other names."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.models.families import qwen2_moe, qwen3_next
from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import MLP, layer_tensors
from jaxserve.models.families.qwen2_5_vl import TOKENS
from jaxserve.models.families.qwen2_moe import mixture
from jaxserve.models.families.qwen3_next import hybrid_fields, hybrid_tensors
from jaxserve.models.families.text_part import text_part
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = _reader(config)
    read.expect("mlp_only_layers", [], None)  # published, though no layer has experts
    spec = ModelSpec(family="qwen3_5", **hybrid_fields(read, num_key_value_heads=4))
    read.finish()
    return spec


def moe_spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = _reader(config)
    read.expect("norm_topk_prob", True)
    read.expect("mlp_only_layers", [], None)
    read.expect("decoder_sparse_step", 1)
    layers = read.integer("num_hidden_layers")
    d_shared = read.integer("shared_expert_intermediate_size", 512)
    experts = mixture(read, layers, norm_topk_prob=True, d_shared=d_shared, shared_gate=True)
    spec = ModelSpec(
        family="qwen3_5_moe",
        mixture=experts,
        # Every layer has experts, and no field says how large another MLP would be.
        **hybrid_fields(read, num_key_value_heads=2, intermediate_size=experts.d_expert),
    )
    read.finish()
    return spec


def _reader(config: Mapping[str, Any]) -> ConfigReader:
    """Return a reader that knows the fields which every published file has alike."""
    read = ConfigReader(config)
    read.expect("attn_output_gate", True)
    read.expect("output_gate_type", "swish")
    read.expect("mamba_ssm_dtype", "float32")
    # Of layers that predict further tokens, which are left out.
    read.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    return read


def dense_tensors(spec: ModelSpec) -> list[Tensor]:
    return hybrid_tensors(spec, _projections)


def stacked_tensors(spec: ModelSpec) -> list[Tensor]:
    """Return the weight table of published bfloat16 files: one tensor holds all experts."""
    return hybrid_tensors(spec, _projections, _stacked)


def separate_tensors(spec: ModelSpec) -> list[Tensor]:
    """Return the weight table of published FP8 files: every expert has its own tensors."""
    return hybrid_tensors(spec, _projections, partial(qwen2_moe.separate_experts, spec))


def _projections(layer: int) -> list[Tensor]:
    """Return the rows of a state's input: all queries, all keys, all values, and their gates."""
    table = {
        "in_proj_z.weight": ("state_gate", "(krv)D"),
        "in_proj_b.weight": ("writing", "(kr)D"),
        "in_proj_a.weight": ("decay", "(kr)D"),
    }
    params = ("state_query", "state_key", "state_value")
    rows = qwen3_next.query_key_value(layer, "in_proj_qkv.weight", params, "D")
    return rows + qwen3_next.state_tensors(layer, table)


def _stacked(layer: int) -> list[Tensor]:
    at = ("layers", layer, "experts")
    gate_up = f"model.layers.{layer}.mlp.experts.gate_up_proj"
    shared = {f"mlp.shared_expert.{name}_proj.weight": (name, axes) for name, axes in MLP.items()}
    return [
        *layer_tensors(layer, {"mlp.gate.weight": ("router", "OD")}),
        Tensor(gate_up, (*at, "gate"), "E([F|F])D"),
        Tensor(gate_up, (*at, "up"), "E([F|F])D", part=1),
        *layer_tensors(layer, {"mlp.experts.down_proj": ("down", "EDF")}, "experts"),
        *layer_tensors(layer, shared, "shared"),
        *qwen2_moe.shared_gate(layer),
    ]


DENSE = Family(spec_from_hf, dense_tensors, ignored=qwen3_next.without_prediction)
MOE = Family(
    moe_spec_from_hf,
    stacked_tensors,
    other_tensors=(separate_tensors,),
    ignored=qwen3_next.without_prediction,
)
# Files say whether they have a tower as well.
OUTSIDE = (*TOKENS, "language_model_only")
DENSE_WITH_IMAGES = text_part({"qwen3_5_text": DENSE}, ("visual",), *OUTSIDE)
MOE_WITH_IMAGES = text_part({"qwen3_5_moe_text": MOE}, ("visual",), *OUTSIDE)
