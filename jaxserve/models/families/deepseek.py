"""DeepSeek-V2, V3, R1: latent attention, experts chosen by groups, an MLP that all tokens take,
dense first layers.
"""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import (
    MLP,
    PRE_NORMS,
    expert_tensors,
    layer_tensors,
    outer_tensors,
)
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.rope import YarnRope
from jaxserve.models.spec import Latent, Mixture, ModelSpec


def spec_from_v2(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("scoring_func", "softmax")
    read.expect("norm_topk_prob", False)  # transformers has no other
    read.expect("topk_method", "greedy", "group_limited_greedy")
    read.expect("mlp_bias", False)
    read.expect("rope_interleave", True)
    limited = config.get("topk_method") == "group_limited_greedy"
    read.ignore("n_group", "topk_group")  # of a greedy choice
    groups = (
        dict(groups=read.integer("n_group"), groups_taken=read.integer("topk_group"))
        if limited
        else {}
    )
    routing = dict(normalized=False, scale=float(read.take("routed_scaling_factor", 1.0)), **groups)
    return _spec(read, "deepseek_v2", first_dense=0, routing=routing)


def spec_from_v3(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("scoring_func", "sigmoid")
    read.expect("topk_method", "noaux_tc")
    read.expect("norm_topk_prob", True, False)
    routing = dict(
        scores="sigmoid",
        corrected=True,
        normalized=config.get("norm_topk_prob", True),
        scale=float(read.take("routed_scaling_factor", 2.5)),
        groups=read.integer("n_group", 8),
        groups_taken=read.integer("topk_group", 4),
        judges=2,
    )
    read.expect("rope_interleave", True)
    return _spec(read, "deepseek_v3", first_dense=3, routing=routing)


def _spec(read: ConfigReader, family: str, first_dense: int, routing: dict[str, Any]) -> ModelSpec:
    """first_dense: how many layers are dense where config.json does not say."""
    read.expect("hidden_act", "silu")
    read.expect("attention_bias", False)
    read.expect("moe_layer_freq", 1)
    read.ignore("head_dim", "qk_head_dim")  # what others derive from the figures below
    read.ignore(
        "aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp", "output_router_logits"
    )  # of training
    read.ignore(
        "num_nextn_predict_layers", "num_mtp_layers"
    )  # layers that propose tokens: not loaded
    heads, layers, d_expert = (
        read.integer(name)
        for name in ("num_attention_heads", "num_hidden_layers", "moe_intermediate_size")
    )
    read.expect("num_key_value_heads", heads, None)
    dense = read.take("first_k_dense_replace", first_dense, kind=int)
    latent = Latent(
        query_rank=None
        if read.nullable("q_lora_rank", 1536) is None
        else read.integer("q_lora_rank", 1536),
        rank=read.integer("kv_lora_rank", 512),
        head=read.integer("qk_nope_head_dim", 128),
        rotated=read.integer("qk_rope_head_dim", 64),
        value=read.integer("v_head_dim", 128),
    )
    rope = read.rope(default_theta=10000.0)
    head_dim = latent.head + latent.rotated
    spec = ModelSpec(
        family=family,
        vocab_size=read.integer("vocab_size"),
        d_model=read.integer("hidden_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=head_dim,
        d_mlp=read.integer("intermediate_size"),
        norm_eps=float(read.take("rms_norm_eps", 1e-6)),
        max_positions=read.integer("max_position_embeddings"),
        rope=rope,
        attn_scale=head_dim**-0.5 * (rope.score_factor if isinstance(rope, YarnRope) else 1.0),
        tied_head=read.take("tie_word_embeddings", False, kind=bool),
        latent=latent,
        mixture=Mixture(
            experts=read.integer("n_routed_experts"),
            taken=read.integer("num_experts_per_tok"),
            d_expert=d_expert,
            layers=tuple(range(dense, layers)),
            d_shared=d_expert * read.integer("n_shared_experts"),
            **routing,
        ),
    )
    read.finish()
    return spec


def tensors(spec: ModelSpec) -> list[Tensor]:
    assert spec.latent
    table = {f"{name}.weight": (param, "D") for name, param in PRE_NORMS.items()}
    table |= {
        "self_attn.kv_a_layernorm.weight": ("latent_norm", "m"),
        "self_attn.o_proj.weight": ("o", "D(Nw)"),
    }
    query = "self_attn.q_proj.weight", "(N[u|ij])D"
    if spec.latent.query_rank:
        table |= {"self_attn.q_a_layernorm.weight": ("query_norm", "y")}
        table |= {"self_attn.q_a_proj.weight": ("compress_query", "yD")}
        query = "self_attn.q_b_proj.weight", "(N[u|ij])y"
    in_two = {  # pairs of rotated dimensions lie side by side: i, then j
        query: ("query_plain", "query_rotated"),
        ("self_attn.kv_a_proj_with_mqa.weight", "([m|ij])D"): (
            "compress_latent",
            "compress_rotated",
        ),
        ("self_attn.kv_b_proj.weight", "(N[u|w])m"): ("key_up", "value_up"),
    }
    mlp = {f"mlp.{name}_proj.weight": (name, axes) for name, axes in MLP.items()}
    rows = outer_tensors(spec)
    for layer in range(spec.num_layers):
        rows += layer_tensors(layer, table)
        rows += [
            Tensor(f"model.layers.{layer}.{name}", ("layers", layer, param), axes, part)
            for (name, axes), params in in_two.items()
            for part, param in enumerate(params)
        ]
        rows += _experts(spec, layer) if spec.has_experts(layer) else layer_tensors(layer, mlp)
    return rows


def _experts(spec: ModelSpec, layer: int) -> list[Tensor]:
    assert spec.mixture
    correction = (
        {"mlp.gate.e_score_correction_bias": ("correction", "O")} if spec.mixture.corrected else {}
    )
    return expert_tensors(spec, layer, shared="shared_experts") + layer_tensors(layer, correction)


def ignored(spec: ModelSpec) -> tuple[str, ...]:
    """The layers behind the last, which propose tokens."""
    return tuple(f"model.layers.{layer}.*" for layer in range(spec.num_layers, spec.num_layers + 4))


V2 = Family(spec_from_v2, tensors, ignored)
V3 = Family(spec_from_v3, tensors, ignored)
