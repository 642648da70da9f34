"""Granite 3, dense and with experts: Llama with four factors, as of muP (Yang et al. 2022)."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import layer_tensors, tensors
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.mixture import Mixture
from jaxserve.models.spec import ModelSpec

BLOCK = "block_sparse_moe"


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    spec = ModelSpec(
        family="granite", mlp_bias=read.take("mlp_bias", False, kind=bool), **_fields(read)
    )
    read.finish()
    return spec


def moe_spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    # Fields that only training uses.
    read.ignore("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")
    read.expect("activation_function", "silu")  # an older name of hidden_act
    fields = _fields(read)
    spec = ModelSpec(
        family="granite_moe",
        mixture=Mixture(
            experts=read.integer("num_local_experts", 8),
            taken=read.integer("num_experts_per_tok", 2),
            d_expert=fields["d_mlp"],
            layers=tuple(range(fields["num_layers"])),
        ),
        **fields,
    )
    read.finish()
    return spec


def _fields(read: ConfigReader) -> dict[str, Any]:
    """Read the fields that models with and without experts share."""
    read.expect("hidden_act", "silu")
    bias = read.take("attention_bias", False, kind=bool)
    return dict(
        qkv_bias=bias,
        out_bias=bias,
        embed_scale=read.positive("embedding_multiplier", 1.0),
        attn_scale=read.positive("attention_multiplier", 1.0),
        residual_scale=read.positive("residual_multiplier", 1.0),
        logit_divisor=read.positive("logits_scaling", 1.0),
        **read.llama_like(),
    )


def moe_tensors(spec: ModelSpec) -> list[Tensor]:
    return tensors(spec, experts=_experts)


def _experts(layer: int) -> list[Tensor]:
    """Return the rows of the router and of all experts, which one tensor holds."""
    name = f"model.layers.{layer}.{BLOCK}.input_linear.weight"
    return [
        *layer_tensors(layer, {f"{BLOCK}.router.layer.weight": ("router", "OD")}),
        Tensor(name, ("layers", layer, "experts", "gate"), "E([F|F])D"),
        Tensor(name, ("layers", layer, "experts", "up"), "E([F|F])D", part=1),
        *layer_tensors(layer, {f"{BLOCK}.output_linear.weight": ("down", "EDF")}, "experts"),
    ]


DENSE = Family(spec_from_hf, tensors)
MOE = Family(moe_spec_from_hf, moe_tensors)
