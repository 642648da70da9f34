"""Llama 2, 3, 3.1, 3.2, and what shares their config and names."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.family import ConfigReader, Family, Tensor
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    heads, d_model = read.integer("num_attention_heads"), read.integer("hidden_size")
    bias = read.take("attention_bias", False, kind=bool)
    read.expect("hidden_act", "silu")
    read.ignore("pretraining_tp")  # how a matrix product was split in training: the same product
    spec = ModelSpec(
        family="llama",
        vocab_size=read.integer("vocab_size"),
        d_model=d_model,
        num_layers=read.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=read.integer("num_key_value_heads", heads),
        head_dim=read.integer("head_dim", d_model // heads),
        d_mlp=read.integer("intermediate_size"),
        norm_eps=float(read.take("rms_norm_eps", 1e-6)),
        max_positions=read.integer("max_position_embeddings"),
        rope=read.rope(default_theta=10000.0),
        tied_head=read.take("tie_word_embeddings", False, kind=bool),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=read.take("mlp_bias", False, kind=bool),
    )
    read.finish()
    return spec


def tensors(spec: ModelSpec) -> list[Tensor]:
    rows = [Tensor("model.embed_tokens.weight", ("embed",), "VD"), Tensor("model.norm.weight", ("norm",), "D")]
    if not spec.tied_head:
        rows.append(Tensor("lm_head.weight", ("head",), "VD"))
    return rows + [row for layer in range(spec.num_layers) for row in layer_tensors(spec, layer)]


def layer_tensors(spec: ModelSpec, layer: int) -> list[Tensor]:
    table = {
        "input_layernorm.weight": ("attn_norm", "D"),
        "self_attn.q_proj.weight": ("q", "(NH)D"),
        "self_attn.k_proj.weight": ("k", "(KH)D"),
        "self_attn.v_proj.weight": ("v", "(KH)D"),
        "self_attn.o_proj.weight": ("o", "D(NH)"),
        "post_attention_layernorm.weight": ("mlp_norm", "D"),
        "mlp.gate_proj.weight": ("gate", "FD"),
        "mlp.up_proj.weight": ("up", "FD"),
        "mlp.down_proj.weight": ("down", "DF"),
    }
    if spec.qkv_bias:
        table |= {f"self_attn.{name}_proj.bias": (f"{name}_bias", axes) for name, axes in _QKV_BIASES.items()}
    if spec.out_bias:
        table |= {"self_attn.o_proj.bias": ("o_bias", "D")}
    if spec.mlp_bias:
        table |= {f"mlp.{name}_proj.bias": (f"{name}_bias", axes) for name, axes in _MLP_BIASES.items()}
    if spec.qk_norm == "head":
        table |= {"self_attn.q_norm.weight": ("q_norm", "H"), "self_attn.k_norm.weight": ("k_norm", "H")}
    return [
        Tensor(f"model.layers.{layer}.{name}", ("layers", layer, param), axes) for name, (param, axes) in table.items()
    ]


_QKV_BIASES = {"q": "(NH)", "k": "(KH)", "v": "(KH)"}
_MLP_BIASES = {"gate": "F", "up": "F", "down": "D"}

FAMILY = Family(spec_from_hf, tensors, ignored_tensors=("rotary_emb.inv_freq",))
