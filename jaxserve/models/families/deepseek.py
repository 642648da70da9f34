"""DeepSeek-V2, V3 and R1: multi-head latent attention and a mixture of experts.

Experts are chosen by groups, beside an MLP that all tokens take; the first layers are dense.
"""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.hf_config import ConfigReader, longest_context
from jaxserve.models.families.hf_names import (
    MLP,
    PRE_NORMS,
    expert_tensors,
    layer_tensors,
    outer_tensors,
)
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.layer_kind import Latent, LayerKind
from jaxserve.models.mixture import Mixture
from jaxserve.models.rope import YarnRope
from jaxserve.models.spec import ModelSpec

# Defaults of V2 and V3 for absent sizes of latent attention.
SIZES = Latent(query_rank=1536, rank=512, head=128, rotated=64, value=128)


def spec_from_v2(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("scoring_func", "softmax")
    read.expect("norm_topk_prob", False)  # the only value that transformers implements
    read.expect("topk_method", "greedy", "group_limited_greedy")
    read.expect("mlp_bias", False)
    read.expect("rope_interleave", True)
    routing: dict[str, Any] = dict(
        normalized=False, scale=read.positive("routed_scaling_factor", 1.0)
    )
    read.ignore("n_group", "topk_group")  # a greedy choice does not use them
    if config.get("topk_method") == "group_limited_greedy":
        routing["groups"] = read.integer("n_group")
        routing["groups_taken"] = read.integer("topk_group")
    return latent_spec(read, "deepseek_v2", _expert_layers(read, first_dense=0), routing)


def spec_from_v3(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    routing = corrected_routing(read, scale=2.5, groups=8, groups_taken=4)
    return latent_spec(read, "deepseek_v3", _expert_layers(read, first_dense=3), routing)


def corrected_routing(
    read: ConfigReader, *, scale: float, groups: int, groups_taken: int
) -> dict[str, Any]:
    """Read V3's choice of experts: by sigmoid scores and a learned correction, in groups.

    The parameters are the family's defaults for absent fields.
    """
    read.expect("scoring_func", "sigmoid")
    read.expect("topk_method", "noaux_tc")
    read.expect("norm_topk_prob", True, False)
    return dict(
        scores="sigmoid",
        corrected=True,
        normalized=read.take("norm_topk_prob", True, kind=bool),
        scale=read.positive("routed_scaling_factor", scale),
        groups=read.integer("n_group", groups),
        groups_taken=read.integer("topk_group", groups_taken),
        judges=2,
    )


def _expert_layers(read: ConfigReader, first_dense: int) -> tuple[int, ...]:
    """Return the layers with experts, which are those behind the dense ones.

    Args:
        first_dense: Number of dense layers, where config.json does not say it.
    """
    dense = read.count("first_k_dense_replace", first_dense)
    return tuple(range(dense, read.integer("num_hidden_layers")))


def latent_spec(
    read: ConfigReader,
    family: str,
    expert_layers: tuple[int, ...],
    routing: dict[str, Any],
    *,
    rms_norm_eps: float = 1e-6,
    sizes: Latent = SIZES,
) -> ModelSpec:
    """Read the fields of latent attention and experts, and refuse those that are left.

    Args:
        routing: Fields of the Mixture that differ between families.
        rms_norm_eps: Default of the family for an absent field.
        sizes: Defaults of the family for absent sizes of latent attention.
    """
    read.expect("hidden_act", "silu")
    bias = read.take("attention_bias", False, kind=bool)
    read.expect("moe_layer_freq", 1)
    read.expect("pruned_heads", {})
    read.ignore("head_dim", "qk_head_dim")  # derived from the fields of latent attention
    # Fields that only training uses.
    read.ignore("aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp", "output_router_logits")
    # Layers that propose tokens are not loaded.
    read.ignore("num_nextn_predict_layers", "num_mtp_layers")
    fields = read.common(rms_norm_eps=rms_norm_eps)
    heads = fields["num_heads"]
    read.expect("num_key_value_heads", heads, None)
    latent = _latent(read, sizes)
    rope = read.rope(default_theta=10000.0)
    head_dim = latent.head + latent.rotated
    score_factor = rope.score_factor if isinstance(rope, YarnRope) else 1.0
    fields["max_positions"] = longest_context(rope, fields["max_positions"])
    spec = ModelSpec(
        family=family,
        num_kv_heads=1,
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        rope=rope,
        attn_scale=head_dim**-0.5 * score_factor,
        layers=(LayerKind(latent=latent),) * fields["num_layers"],
        mixture=_mixture(read, expert_layers, routing),
        **fields,
    )
    read.finish()
    return spec


def _mixture(
    read: ConfigReader, layers: tuple[int, ...], routing: dict[str, Any]
) -> Mixture | None:
    """Read the sizes of experts; None where every layer is dense."""
    d_expert = read.integer("moe_intermediate_size")
    experts = read.integer("n_routed_experts")
    taken = read.integer("num_experts_per_tok")
    shared = read.integer("n_shared_experts")
    if not layers:
        return None
    return Mixture(
        experts=experts,
        taken=taken,
        d_expert=d_expert,
        layers=layers,
        d_shared=d_expert * shared,
        router_float32=True,
        **routing,
    )


def _latent(read: ConfigReader, absent: Latent) -> Latent:
    """Read the sizes of latent attention; a null q_lora_rank leaves queries uncompressed."""
    query_rank = None
    if read.nullable("q_lora_rank", absent.query_rank) is not None:
        query_rank = read.integer("q_lora_rank", absent.query_rank)
    return Latent(
        query_rank=query_rank,
        rank=read.integer("kv_lora_rank", absent.rank),
        head=read.integer("qk_nope_head_dim", absent.head),
        rotated=read.integer("qk_rope_head_dim", absent.rotated),
        value=read.integer("v_head_dim", absent.value),
        interleaved=read.take("rope_interleave", True, kind=bool),
    )


def tensors(spec: ModelSpec) -> list[Tensor]:
    assert spec.latent
    # The two numbers of a rotated pair lie beside each other: i, then j; or first numbers lie
    # before second ones.
    pairs = "ij" if spec.latent.interleaved else "ji"
    table = {f"{name}.weight": (param, "D") for name, param in PRE_NORMS.items()}
    table |= {
        "self_attn.kv_a_layernorm.weight": ("latent_norm", "m"),
        "self_attn.o_proj.weight": ("o", "D(Nw)"),
    }
    if spec.out_bias:
        table |= {"self_attn.o_proj.bias": ("o_bias", "D")}
    query = ("self_attn.q_proj.weight", f"(N[u|{pairs}])D")
    if spec.latent.query_rank:
        table |= {"self_attn.q_a_layernorm.weight": ("query_norm", "y")}
        table |= {"self_attn.q_a_proj.weight": ("compress_query", "yD")}
        if spec.qkv_bias:
            table |= {"self_attn.q_a_proj.bias": ("compress_query_bias", "y")}
        query = ("self_attn.q_b_proj.weight", f"(N[u|{pairs}])y")
    # Tensors that hold two parameters each.
    compress = "self_attn.kv_a_proj_with_mqa"
    in_two = {
        query: ("query_plain", "query_rotated"),
        (f"{compress}.weight", f"([m|{pairs}])D"): ("compress_latent", "compress_rotated"),
        ("self_attn.kv_b_proj.weight", "(N[u|w])m"): ("key_up", "value_up"),
    }
    if spec.qkv_bias:
        biases = ("compress_latent_bias", "compress_rotated_bias")
        in_two |= {(f"{compress}.bias", f"([m|{pairs}])"): biases}
    mlp = {f"mlp.{name}_proj.weight": (name, axes) for name, axes in MLP.items()}
    rows = outer_tensors(spec)
    for layer in range(spec.num_layers):
        rows += layer_tensors(layer, table)
        rows += [
            Tensor(f"model.layers.{layer}.{name}", ("layers", layer, param), axes, part)
            for (name, axes), params in in_two.items()
            for part, param in enumerate(params)
        ]
        rows += experts(spec, layer) if spec.has_experts(layer) else layer_tensors(layer, mlp)
    return rows


def experts(spec: ModelSpec, layer: int) -> list[Tensor]:
    """Return the rows of a layer's experts, with the MLP that all tokens take."""
    assert spec.mixture
    rows = expert_tensors(spec, layer, shared="shared_experts")
    if spec.mixture.corrected:
        rows += layer_tensors(layer, {"mlp.gate.e_score_correction_bias": ("correction", "O")})
    return rows


def ignored(spec: ModelSpec) -> tuple[str, ...]:
    """Return patterns of the layers behind the last, which propose tokens."""
    return tuple(f"model.layers.{layer}.*" for layer in range(spec.num_layers, spec.num_layers + 4))


V2 = Family(spec_from_v2, tensors, ignored)
V3 = Family(spec_from_v3, tensors, ignored)
