"""ERNIE 4.5, dense and with experts: Llama whose rotated pairs are neighbours.

Experts are chosen by softmax scores and a learned correction, beside an MLP that all tokens take.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import expert_tensors, layer_tensors, neighbours, tensors
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.mixture import Mixture
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    spec = ModelSpec(family="ernie4_5", **_fields(read, num_key_value_heads=2, head_dim=128))
    read.finish()
    return spec


def moe_spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("use_bias", False)  # here the head would have a bias as well
    fields = _fields(read, num_key_value_heads=4)
    spec = ModelSpec(family="ernie4_5_moe", mixture=_mixture(read, fields["num_layers"]), **fields)
    read.finish()
    return spec


def _fields(read: ConfigReader, **defaults: Any) -> dict[str, Any]:
    """Read the fields that models with and without experts share."""
    read.expect("hidden_act", "silu")
    read.expect("use_rmsnorm", True)
    bias = read.take("use_bias", False, kind=bool)
    return dict(
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        **read.llama_like(
            rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=True, **defaults
        ),
    )


def _mixture(read: ConfigReader, layers: int) -> Mixture:
    read.expect("moe_gate", "topk")
    read.expect("moe_use_aux_free", True)
    read.expect("moe_norm_min", 1e-12)
    # Fields that only training uses.
    read.ignore("router_aux_loss_coef", "output_router_logits", "moe_capacity")
    # Layers that propose tokens are not loaded.
    read.ignore("num_nextn_predict_layers", "multi_token_pred_lambda")
    d_expert = read.integer("moe_intermediate_size", 1536)
    return Mixture(
        experts=read.integer("moe_num_experts", 64),
        taken=read.integer("moe_k", 6),
        d_expert=d_expert,
        layers=_expert_layers(read, layers),
        corrected=True,
        router_float32=True,
        d_shared=d_expert * read.count("moe_num_shared_experts", 2),
    )


def _expert_layers(read: ConfigReader, layers: int) -> tuple[int, ...]:
    """Return the layers with experts: every so many from the first to the last that may have.

    A last layer of -1 is that of the model.
    """
    first = read.count("moe_layer_start_index", 1)
    interval = read.integer("moe_layer_interval", 1)
    end = layers
    if read.take("moe_layer_end_index", -1) != -1:
        end = min(read.count("moe_layer_end_index", 0) + 1, layers)
    return tuple(layer for layer in range(first, end) if (layer + 1) % interval == 0)


def dense_tensors(spec: ModelSpec) -> list[Tensor]:
    return neighbours(spec, tensors(spec))


def moe_tensors(spec: ModelSpec) -> list[Tensor]:
    return neighbours(spec, tensors(spec, experts=partial(_experts, spec)))


def _experts(spec: ModelSpec, layer: int) -> list[Tensor]:
    assert spec.mixture
    shared = "shared_experts" if spec.mixture.d_shared else ""
    correction = {"mlp.moe_statics.e_score_correction_bias": ("correction", "()O")}
    return expert_tensors(spec, layer, shared=shared) + layer_tensors(layer, correction)


def ignored(spec: ModelSpec) -> tuple[str, ...]:
    """Return patterns of the blocks behind the layers, which propose tokens."""
    return ("model.mtp_*",)


DENSE = Family(spec_from_hf, dense_tensors)
MOE = Family(moe_spec_from_hf, moe_tensors, ignored)
