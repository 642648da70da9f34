"""Phi-3 and Phi-4-mini: Llama with q, k and v in one tensor, gate and up in another, and part of a
head rotated.
"""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import PRE_NORMS, outer_tensors
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.rope import LongRope
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    heads, d_model = read.integer("num_attention_heads"), read.integer("hidden_size")
    layers, positions = read.integer("num_hidden_layers"), read.integer("max_position_embeddings")
    read.expect("hidden_act", "silu")
    read.expect("attention_bias", False)
    read.expect("mlp_bias", False)
    read.expect("lm_head_bias", False)
    read.expect("full_attn_mod", 1)
    read.expect("interpolate_factor", 1)
    read.ignore("embd_pdrop", "resid_pdrop")  # dropout of training
    beside = {
        "partial_rotary_factor": read.take("partial_rotary_factor", 1.0),
        "original_max_position_embeddings": read.integer(
            "original_max_position_embeddings", positions
        ),
    }
    rope = read.rope(default_theta=10000.0, beside=beside)
    spec = ModelSpec(
        family="phi3",
        vocab_size=read.integer("vocab_size"),
        d_model=d_model,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.kv_heads(heads),
        head_dim=read.integer("head_dim", d_model // heads),
        d_mlp=read.integer("intermediate_size"),
        norm_eps=float(read.take("rms_norm_eps", 1e-5)),
        max_positions=rope.original_context if isinstance(rope, LongRope) else positions,
        rope=rope,
        windows=(read.window(),) * layers,
        tied_head=read.take("tie_word_embeddings", False, kind=bool),
    )
    read.finish()
    return spec


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
