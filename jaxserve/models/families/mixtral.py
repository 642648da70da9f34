"""Mixtral: Mistral with eight experts for every MLP, two of which a token takes."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import expert_tensors, tensors
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.spec import Mixture, ModelSpec

NAMES = {"w1": "gate", "w3": "up", "w2": "down"}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    heads, d_model = read.integer("num_attention_heads"), read.integer("hidden_size")
    layers, d_mlp = read.integer("num_hidden_layers"), read.integer("intermediate_size")
    read.expect("hidden_act", "silu")
    read.ignore(
        "router_aux_loss_coef", "router_jitter_noise", "output_router_logits"
    )  # of training
    spec = ModelSpec(
        family="mixtral",
        vocab_size=read.integer("vocab_size"),
        d_model=d_model,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.kv_heads(heads, 8),
        head_dim=read.integer("head_dim", d_model // heads),
        d_mlp=d_mlp,
        norm_eps=float(read.take("rms_norm_eps", 1e-5)),
        max_positions=read.integer("max_position_embeddings"),
        rope=read.rope(default_theta=1e6),
        windows=(read.window(),) * layers,
        tied_head=read.take("tie_word_embeddings", False, kind=bool),
        mixture=Mixture(
            experts=read.integer("num_local_experts", 8),
            taken=read.integer("num_experts_per_tok", 2),
            d_expert=d_mlp,
            layers=tuple(range(layers)),
        ),
    )
    read.finish()
    return spec


def mixtral_tensors(spec: ModelSpec) -> list[Tensor]:
    return tensors(
        spec, experts=partial(expert_tensors, spec, prefix="block_sparse_moe", names=NAMES)
    )


FAMILY = Family(spec_from_hf, mixtral_tensors)
