"""LFM2 and LFM2.5, dense and with experts: short convolutions in place of most attention."""

from collections.abc import Mapping
from functools import partial
from math import ceil
from typing import Any, Final

from jaxserve.errors import ModelError
from jaxserve.models.families import hf_names
from jaxserve.models.families.hf_config import FULL, ConfigReader
from jaxserve.models.families.hf_names import expert_tensors, layer_tensors
from jaxserve.models.families.typed_fields import MAX_SIZE, shown
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.layer_kind import ConvState, LayerKind
from jaxserve.models.mixture import Mixture
from jaxserve.models.spec import ModelSpec

CONV: Final = "conv"  # in layer_types
BLOCK: Final = "feed_forward"
NORMS = {"operator_norm": "attn_norm", "ffn_norm": "mlp_norm"}
MLP = {"w1": "gate", "w3": "up", "w2": "down"}
NAMES = {
    "model.norm.": "model.embedding_norm.",
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".self_attn.q_norm.": ".self_attn.q_layernorm.",
    ".self_attn.k_norm.": ".self_attn.k_layernorm.",
    ".mlp.gate_proj.": f".{BLOCK}.w1.",
    ".mlp.up_proj.": f".{BLOCK}.w3.",
    ".mlp.down_proj.": f".{BLOCK}.w2.",
}
INPUTS = ("conv_before", "conv_behind", "conv_value")  # parts of in_proj, in its order


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    fields = _fields(read, intermediate_size=12288)
    fields["d_mlp"] = _mlp_size(read, fields["d_mlp"])
    spec = ModelSpec(family="lfm2", **fields)
    read.finish()
    return spec


def moe_spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    fields = _fields(read, intermediate_size=7168)
    spec = ModelSpec(family="lfm2_moe", mixture=_mixture(read, fields["num_layers"]), **fields)
    read.finish()
    return spec


def _fields(read: ConfigReader, **defaults: Any) -> dict[str, Any]:
    """Read what models with and without experts have alike."""
    fields = read.llama_like(
        num_key_value_heads=8,
        rope_theta=1e6,
        eps_field="norm_eps",
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        **defaults,
    )
    # Other names, as transformers takes them, and sizes that are written twice.
    fields["tied_head"] = read.take("tie_embedding", fields["tied_head"], kind=bool)
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        read.expect(name, fields["d_model"])
    read.expect("num_heads", fields["num_heads"])
    read.expect("conv_bias", False, None)
    read.expect("use_pos_enc", True)
    read.expect("block_use_swiglu", True)
    # Fields of training.
    read.ignore("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init")
    read.ignore("conv_use_xavier_init", "output_router_logits", "model_name")
    # Other names of norm_eps and rope_theta, which transformers does not read either.
    read.ignore("block_norm_eps", "theta")
    return fields | {"qk_norm": "head", "layers": _layers(read, fields)}


def _layers(read: ConfigReader, fields: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    """Return the kind of every layer; full_attn_idxs counts where layer_types is not there."""
    count = fields["num_layers"]
    with_attention = read.take("full_attn_idxs", list(range(count)), kind=list)
    if any(type(layer) is not int or not 0 <= layer < count for layer in with_attention):
        raise ModelError(
            f"config.json: full_attn_idxs is {shown(with_attention)}; it must list layers, from 0 "
            f"to {count - 1}"
        )
    usual = [FULL if layer in with_attention else CONV for layer in range(count)]
    kinds = read.layer_types(usual, FULL, CONV)
    if FULL not in kinds:
        where = "layer_types" if read.has("layer_types") else "full_attn_idxs"
        raise ModelError(f"config.json: {where} has no layer with attention: not implemented")
    # Any part of the numbers can be a head; as many as of keys divide among the same devices.
    heads = fields["num_kv_heads"]
    if fields["d_model"] % heads:
        raise ModelError(
            f"config.json: hidden_size {fields['d_model']} does not divide by {heads} kv heads"
        )
    state = ConvState(heads, fields["d_model"] // heads, read.integer("conv_L_cache", 3))
    return tuple(LayerKind(state=state) if kind == CONV else LayerKind() for kind in kinds)


def _mlp_size(read: ConfigReader, intermediate: int) -> int:
    """Return the size of the MLP, which is made from two thirds of what config.json names."""
    size = read.integer("block_ff_dim", intermediate)
    multiple = read.integer("block_multiple_of", 256)
    adjusts = read.take("block_auto_adjust_ff_dim", True, kind=bool)
    scales = read.nullable("block_ffn_dim_multiplier", 1.0) is not None
    factor = read.positive("block_ffn_dim_multiplier", 1.0)
    if not adjusts:
        return size
    size = int(2 * size / 3)
    if not factor * size <= MAX_SIZE:
        raise ModelError(
            f"config.json: block_ffn_dim_multiplier is {factor:g}, which makes MLPs of more than "
            f"{MAX_SIZE} of {size}"
        )
    return multiple * ceil(int(factor * size) / multiple) if scales else size


def _mixture(read: ConfigReader, layers: int) -> Mixture:
    dense = read.count("num_dense_layers", 2)
    return Mixture(
        experts=read.integer("num_experts", 32),
        taken=read.integer("num_experts_per_tok", 4),
        d_expert=read.integer("moe_intermediate_size", 1792),
        layers=tuple(range(dense, layers)),
        scores="sigmoid",
        corrected=read.take("use_expert_bias", True, kind=bool),
        normalized=read.take("norm_topk_prob", True, kind=bool),
        scale=read.positive("routed_scaling_factor", 1.0),
    )


def lfm2_tensors(spec: ModelSpec) -> list[Tensor]:
    rows = hf_names.tensors(spec, NORMS, partial(_experts, spec), _convolution)
    return hf_names.renamed(rows, NAMES)


def _experts(spec: ModelSpec, layer: int) -> list[Tensor]:
    rows = expert_tensors(spec, layer, prefix=BLOCK, names=MLP)
    if spec.mixture and spec.mixture.corrected:
        rows += layer_tensors(layer, {f"{BLOCK}.expert_bias": ("correction", "O")})
    return rows


def _convolution(layer: int) -> list[Tensor]:
    table = {
        "conv.conv.weight": ("conv_taps", "(kf)()t"),
        "conv.out_proj.weight": ("conv_out", "D(kf)"),
    }
    name = f"model.layers.{layer}.conv.in_proj.weight"
    inputs = [
        Tensor(name, ("layers", layer, param), "([kf|kf|kf])D", part)
        for part, param in enumerate(INPUTS)
    ]
    return layer_tensors(layer, table) + inputs


DENSE = Family(spec_from_hf, lfm2_tensors)
MOE = Family(moe_spec_from_hf, lfm2_tensors)
