"""MiniMax M2 and M2.5: norms over all heads, half of a head rotated, and corrected experts."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models.families import deepseek
from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import expert_tensors, layer_tensors, tensors
from jaxserve.models.families.mixtral import NAMES
from jaxserve.models.families.typed_fields import shown
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.mixture import Mixture
from jaxserve.models.spec import ModelSpec

BLOCK = "block_sparse_moe"


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("hidden_act", "silu")
    read.expect("scoring_func", "sigmoid")
    read.expect("use_routing_bias", True)
    read.expect("use_qk_norm", True)
    read.expect("qk_norm_type", "per_layer")
    read.expect("shared_intermediate_size", 0)
    read.expect("sliding_window", None)
    for name in ("full_attention", "linear_attention", "mlp"):
        read.expect(f"layernorm_{name}_beta", 1.0)
    # Fields of an MLP that all tokens take, which no published model has.
    read.ignore("mlp_intermediate_size", "shared_moe_mode")
    # Fields that only training uses.
    read.ignore("router_aux_loss_coef", "router_jitter_noise", "output_router_logits")
    # Layers that propose tokens are not loaded.
    read.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    layers = read.integer("num_hidden_layers")
    _check_attention(read, layers)
    spec = ModelSpec(
        family="minimax_m2",
        qk_norm="whole",
        mixture=Mixture(
            experts=read.either("num_local_experts", "num_experts"),
            taken=read.integer("num_experts_per_tok", 8),
            d_expert=read.integer("intermediate_size"),
            layers=tuple(range(layers)),
            scores="sigmoid",
            corrected=True,
        ),
        **read.llama_like(
            num_key_value_heads=8,
            head_dim=128,
            rope=read.rope(5e6, beside={"partial_rotary_factor": _rotated(read)}),
        ),
    )
    read.finish()
    return spec


def _rotated(read: ConfigReader) -> float:
    """Read which part of a head is rotated, which published files give in dimensions."""
    head_dim = read.integer("head_dim", 128)
    dimensions = read.integer("rotary_dim", head_dim)
    rotated = read.positive("partial_rotary_factor", dimensions / head_dim)
    if dimensions < head_dim and rotated * head_dim != dimensions:
        raise ModelError(
            f"config.json: rotary_dim is {dimensions}, and partial_rotary_factor {rotated} of "
            f"{head_dim} dimensions; they have to be the same"
        )
    return rotated


def _check_attention(read: ConfigReader, layers: int) -> None:
    """Raise ModelError unless every layer has softmax attention, which the config calls 1."""
    kinds = read.take("attn_type_list", [1] * layers, kind=list)
    if kinds != [1] * layers:
        raise ModelError(
            f"config.json: attn_type_list is {shown(kinds)}; implemented is 1 for all "
            f"{layers} layers"
        )


def minimax_m2_tensors(spec: ModelSpec) -> list[Tensor]:
    return tensors(spec, experts=partial(_experts, spec))


def _experts(spec: ModelSpec, layer: int) -> list[Tensor]:
    correction = {f"{BLOCK}.e_score_correction_bias": ("correction", "O")}
    rows = expert_tensors(spec, layer, prefix=BLOCK, names=NAMES)
    return rows + layer_tensors(layer, correction)


FAMILY = Family(spec_from_hf, minimax_m2_tensors, deepseek.ignored)
