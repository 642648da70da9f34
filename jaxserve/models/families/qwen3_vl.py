"""Text parts of Qwen3-VL, dense and with experts: Qwen3 with M-RoPE, the plain rope for text."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import layer_tensors, tensors
from jaxserve.models.families.qwen2_5_vl import TOKENS
from jaxserve.models.families.qwen2_moe import mixture
from jaxserve.models.families.text_part import text_part
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.spec import ModelSpec

EXPERTS = "mlp.experts"


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    fields = _attention(read)
    spec = ModelSpec(
        family="qwen3_vl",
        **fields,
        **read.llama_like(num_key_value_heads=32, head_dim=128, rope_theta=500000.0),
    )
    read.finish()
    return spec


def moe_spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("norm_topk_prob", True)
    read.expect("sliding_window", None)
    fields = _attention(read)
    layers = read.integer("num_hidden_layers")
    spec = ModelSpec(
        family="qwen3_vl_moe",
        mixture=mixture(read, layers, norm_topk_prob=True),
        **fields,
        **read.llama_like(num_key_value_heads=16, rope_theta=500000.0),
    )
    read.finish()
    return spec


def _attention(read: ConfigReader) -> dict[str, Any]:
    """Read what Qwen3's attention has beyond that of Llama."""
    read.expect("hidden_act", "silu")
    bias = read.take("attention_bias", False, kind=bool)
    return dict(qk_norm="head", qkv_bias=bias, out_bias=bias)


def moe_tensors(spec: ModelSpec) -> list[Tensor]:
    return tensors(spec, experts=_experts)


def _experts(layer: int) -> list[Tensor]:
    """Return the rows of the router and of all experts, which one tensor holds.

    Published files have its inputs before its outputs, those of transformers 5 behind them.
    """
    at = ("layers", layer, "experts")
    gate_up = f"model.layers.{layer}.{EXPERTS}.gate_up_proj"
    return [
        *layer_tensors(layer, {"mlp.gate.weight": ("router", "OD")}),
        Tensor(gate_up, (*at, "gate"), "ED([F|F])", other_axes="E([F|F])D"),
        Tensor(gate_up, (*at, "up"), "ED([F|F])", 1, other_axes="E([F|F])D"),
        Tensor(f"model.layers.{layer}.{EXPERTS}.down_proj", (*at, "down"), "EFD", other_axes="EDF"),
    ]


DENSE = text_part({"qwen3_vl_text": Family(spec_from_hf, tensors)}, ("visual",), *TOKENS)
MOE = text_part({"qwen3_vl_moe_text": Family(moe_spec_from_hf, moe_tensors)}, ("visual",), *TOKENS)
