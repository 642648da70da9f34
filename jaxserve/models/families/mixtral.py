"""Mixtral: Mistral with a mixture of experts in place of every MLP."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import expert_tensors, tensors
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.layer_kind import windowed
from jaxserve.models.mixture import Mixture
from jaxserve.models.spec import ModelSpec

NAMES = {"w1": "gate", "w3": "up", "w2": "down"}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("hidden_act", "silu")
    # Fields that only training uses.
    read.ignore("router_aux_loss_coef", "router_jitter_noise", "output_router_logits")
    layers = read.integer("num_hidden_layers")
    spec = ModelSpec(
        family="mixtral",
        layers=windowed([read.window()] * layers),
        mixture=Mixture(
            experts=read.integer("num_local_experts", 8),
            taken=read.integer("num_experts_per_tok", 2),
            d_expert=read.integer("intermediate_size"),
            layers=tuple(range(layers)),
        ),
        **read.llama_like(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6),
    )
    read.finish()
    return spec


def mixtral_tensors(spec: ModelSpec) -> list[Tensor]:
    experts = partial(expert_tensors, spec, prefix="block_sparse_moe", names=NAMES)
    return tensors(spec, experts=experts)


FAMILY = Family(spec_from_hf, mixtral_tensors)
