"""gpt-oss: attention with sinks, every other layer with a window; experts with biases and a clamped
gate.
"""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models.families.hf_config import FULL, SLIDING, ConfigReader
from jaxserve.models.families.hf_names import layer_tensors, tensors
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.spec import Mixture, ModelSpec

EXPERTS = {  # gate and up in turn, column by column
    "mlp.experts.gate_up_proj": ("gate_up", "ED(FC)"),
    "mlp.experts.gate_up_proj_bias": ("gate_up_bias", "E(FC)"),
    "mlp.experts.down_proj": ("down", "EFD"),
    "mlp.experts.down_proj_bias": ("down_bias", "ED"),
}
ROUTER = {"mlp.router.weight": ("router", "OD"), "mlp.router.bias": ("router_bias", "O")}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    layers, d_mlp = read.integer("num_hidden_layers"), read.integer("intermediate_size")
    heads = read.integer("num_attention_heads")
    if not (
        config.get("rope_scaling") or config.get("rope_parameters")
    ):  # others assume some of their own
        raise ModelError(
            "config.json lacks 'rope_scaling' (or 'rope_parameters'), which this family needs"
        )
    read.expect("hidden_act", "silu")
    read.expect("attention_bias", True)
    read.expect("swiglu_alpha", 1.702)
    read.ignore("router_aux_loss_coef", "output_router_logits")  # of training
    read.ignore("initial_context_length")  # the rope's original context, which it has itself
    spec = ModelSpec(
        family="gpt_oss",
        vocab_size=read.integer("vocab_size"),
        d_model=read.integer("hidden_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.kv_heads(heads, 8),
        head_dim=read.integer("head_dim", 64),
        d_mlp=d_mlp,
        norm_eps=float(read.take("rms_norm_eps", 1e-5)),
        max_positions=read.integer("max_position_embeddings"),
        rope=read.rope(default_theta=150000.0),
        windows=read.windows(
            read.window(default=128), [FULL if i % 2 else SLIDING for i in range(layers)]
        ),
        tied_head=read.take("tie_word_embeddings", False, kind=bool),
        qkv_bias=True,
        out_bias=True,
        sinks=True,
        activation="clamped",
        activation_limit=float(read.take("swiglu_limit", 7.0)),
        mixture=Mixture(
            experts=read.either("num_local_experts", "num_experts"),
            taken=read.either("num_experts_per_tok", "experts_per_token"),
            d_expert=d_mlp,
            layers=tuple(range(layers)),
            router_bias=True,
            expert_bias=True,
        ),
    )
    read.finish()
    return spec


def gpt_oss_tensors(spec: ModelSpec) -> list[Tensor]:
    sinks = {"self_attn.sinks": ("sinks", "N")}
    rows = [row for layer in range(spec.num_layers) for row in layer_tensors(layer, sinks)]
    return rows + tensors(spec, experts=_experts)


def _experts(layer: int) -> list[Tensor]:
    return layer_tensors(layer, ROUTER) + layer_tensors(layer, EXPERTS, "experts")


FAMILY = Family(spec_from_hf, gpt_oss_tensors)
