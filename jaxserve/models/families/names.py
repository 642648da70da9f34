"""The weight names that the families share, as Hugging Face writes them."""

from collections.abc import Mapping

from jaxserve.models.families.family import Tensor
from jaxserve.models.spec import ModelSpec

PRE_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
PROJECTIONS = {
    "self_attn.q_proj": ("q", "(KGH)D"),
    "self_attn.k_proj": ("k", "(KH)D"),
    "self_attn.v_proj": ("v", "(KH)D"),
    "self_attn.o_proj": ("o", "D(NH)"),
    "mlp.gate_proj": ("gate", "FD"),
    "mlp.up_proj": ("up", "FD"),
    "mlp.down_proj": ("down", "DF"),
}
QKV_BIASES = {"q": "(KGH)", "k": "(KH)", "v": "(KH)"}
MLP_BIASES = {"gate": "F", "up": "F", "down": "D"}
QK_NORMS = {
    "none": {},
    "head": {"q_norm": "H", "k_norm": "H"},
    "whole": {"q_norm": "(NH)", "k_norm": "(KH)"},
}


def outer_tensors(spec: ModelSpec) -> list[Tensor]:
    """Embedding, final norm, and the head unless it is tied."""
    rows = [Tensor("model.embed_tokens.weight", ("embed",), "VD"), Tensor("model.norm.weight", ("norm",), "D")]
    return rows if spec.tied_head else [*rows, Tensor("lm_head.weight", ("head",), "VD")]


def tensors(spec: ModelSpec, norms: Mapping[str, str] = PRE_NORMS) -> list[Tensor]:
    """Every tensor of a decoder with separate projections. norms: name in the checkpoint -> parameter."""
    table = {f"{name}.weight": param for name, param in PROJECTIONS.items()}
    table |= {f"{name}.weight": (param, "D") for name, param in norms.items()}
    table |= {f"self_attn.{name}.weight": (name, axes) for name, axes in QK_NORMS[spec.qk_norm].items()}
    if spec.qkv_bias:
        table |= {f"self_attn.{name}_proj.bias": (f"{name}_bias", axes) for name, axes in QKV_BIASES.items()}
    if spec.out_bias:
        table |= {"self_attn.o_proj.bias": ("o_bias", "D")}
    if spec.mlp_bias:
        table |= {f"mlp.{name}_proj.bias": (f"{name}_bias", axes) for name, axes in MLP_BIASES.items()}
    layers = [
        Tensor(f"model.layers.{layer}.{name}", ("layers", layer, param), axes)
        for layer in range(spec.num_layers)
        for name, (param, axes) in table.items()
    ]
    return outer_tensors(spec) + layers
