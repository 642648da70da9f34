"""gpt-oss: attention sinks, a window in every other layer, experts with a clamped gate."""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models.families.hf_config import FULL, SLIDING, ConfigReader
from jaxserve.models.families.hf_names import layer_tensors, tensors
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.mixture import Mixture
from jaxserve.models.spec import ModelSpec

EXPERTS = {  # the columns of gate and up alternate
    "mlp.experts.gate_up_proj": ("gate_up", "ED(FC)"),
    "mlp.experts.gate_up_proj_bias": ("gate_up_bias", "E(FC)"),
    "mlp.experts.down_proj": ("down", "EFD"),
    "mlp.experts.down_proj_bias": ("down_bias", "ED"),
}
ROUTER = {"mlp.router.weight": ("router", "OD"), "mlp.router.bias": ("router_bias", "O")}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    # Other runtimes assume ropes of their own where these fields are absent.
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        raise ModelError(
            "config.json lacks 'rope_scaling' (or 'rope_parameters'), which this family needs"
        )
    read.expect("hidden_act", "silu")
    read.expect("attention_bias", True)
    read.expect("swiglu_alpha", 1.702)
    read.ignore("router_aux_loss_coef", "output_router_logits")  # only training uses them
    read.ignore("initial_context_length")  # repeats the original context in rope_scaling
    layers = read.integer("num_hidden_layers")
    kinds = [FULL if layer % 2 else SLIDING for layer in range(layers)]
    spec = ModelSpec(
        family="gpt_oss",
        layers=read.layers(read.window(default=128), kinds),
        qkv_bias=True,
        out_bias=True,
        sinks=True,
        activation="clamped",
        activation_limit=read.positive("swiglu_limit", 7.0),
        mixture=Mixture(
            experts=read.either("num_local_experts", "num_experts"),
            taken=read.either("num_experts_per_tok", "experts_per_token"),
            d_expert=read.integer("intermediate_size"),
            layers=tuple(range(layers)),
            router_bias=True,
            expert_bias=True,
        ),
        **read.llama_like(
            num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5, rope_theta=150000.0
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
