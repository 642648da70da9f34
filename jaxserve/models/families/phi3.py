"""Phi-3 and Phi-4-mini: Llama with fused qkv and gate_up tensors, and part of a head rotated."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import PRE_NORMS, outer_tensors
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.layer_kind import windowed
from jaxserve.models.rope import LongRope, Rope
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("hidden_act", "silu")
    read.expect("attention_bias", False)
    read.expect("mlp_bias", False)
    read.expect("lm_head_bias", False)
    read.expect("full_attn_mod", 1)
    read.expect("interpolate_factor", 1)
    read.ignore("embd_pdrop", "resid_pdrop")  # dropout of training
    rope = _rope(read)
    fields = read.llama_like(rms_norm_eps=1e-5, rope=rope)
    if isinstance(rope, LongRope):  # implemented within its original context only
        fields["context_note"] = (
            f"longrope is implemented within original_max_position_embeddings "
            f"({rope.original_context}; max_position_embeddings is {fields['max_positions']})"
        )
        fields["max_positions"] = rope.original_context
    layers = fields["num_layers"]
    spec = ModelSpec(family="phi3", layers=windowed([read.window()] * layers), **fields)
    read.finish()
    return spec


def _rope(read: ConfigReader) -> Rope:
    """Read the rope, two of whose fields stand outside of rope_scaling."""
    positions = read.integer("max_position_embeddings")
    beside = {
        "partial_rotary_factor": read.take("partial_rotary_factor", 1.0),
        "original_max_position_embeddings": read.integer(
            "original_max_position_embeddings", positions
        ),
    }
    return read.rope(default_theta=10000.0, beside=beside)


def tensors(spec: ModelSpec) -> list[Tensor]:
    return outer_tensors(spec) + [
        row for layer in range(spec.num_layers) for row in _layer_tensors(layer)
    ]


def _layer_tensors(layer: int) -> list[Tensor]:
    def row(name: str, param: str, axes: str, part: int = 0) -> Tensor:
        return Tensor(f"model.layers.{layer}.{name}.weight", ("layers", layer, param), axes, part)

    return [
        *(row(name, param, "D") for name, param in PRE_NORMS.items()),
        row("self_attn.qkv_proj", "q", "([KGH|KH|KH])D", 0),
        row("self_attn.qkv_proj", "k", "([KGH|KH|KH])D", 1),
        row("self_attn.qkv_proj", "v", "([KGH|KH|KH])D", 2),
        row("self_attn.o_proj", "o", "D(NH)"),
        row("mlp.gate_up_proj", "gate", "([F|F])D", 0),
        row("mlp.gate_up_proj", "up", "([F|F])D", 1),
        row("mlp.down_proj", "down", "DF"),
    ]


FAMILY = Family(spec_from_hf, tensors)
