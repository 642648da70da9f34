"""Tiny mixture-of-experts models whose golden answers make_goldens.py writes."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from golden_cases import WINDOW, Case, granite_factors, rope, tiny, without_head_dim
from stored_weights import MXFP4, fp8, mtp_layer
from transformers import (  # pyright: ignore[reportMissingImports]
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    GraniteMoeConfig,
    HunYuanMoEV1Config,
    MiniMaxM2Config,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)


def mixtral(**fields: Any) -> MixtralConfig:
    sizes = {**tiny(), "intermediate_size": 12, "num_local_experts": 8, "num_experts_per_tok": 2}
    return MixtralConfig(
        **{**sizes, "rms_norm_eps": 1e-5, "rope_parameters": rope(theta=1e6), **fields}
    )


def qwen2_moe(**fields: Any) -> Qwen2MoeConfig:
    """6 experts, 3 for each token, and a shared expert; qkv biases, which its config takes for
    granted.
    """
    sizes = dict(
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
    )
    figures = dict(rms_norm_eps=1e-6, rope_parameters=rope(theta=1e6))
    return Qwen2MoeConfig(**{**without_head_dim(), **sizes, **figures, **fields})


def qwen3_moe(**fields: Any) -> Qwen3MoeConfig:
    """8 experts, 3 for each token, their weights normalized as when published (not the default of
    the config).
    """
    sizes = dict(
        num_experts=8, num_experts_per_tok=3, moe_intermediate_size=12, norm_topk_prob=True
    )
    figures = dict(rms_norm_eps=1e-6, rope_parameters=rope(theta=1e6))
    return Qwen3MoeConfig(**{**without_head_dim(), **sizes, **figures, **fields})


def mixtral_cases() -> Iterator[Case]:
    """The legacy one is in the form of Mixtral-8x7B-v0.1."""
    published = dict(router_aux_loss_coef=0.02, transformers_version="4.36.0.dev0")
    unpublished = "head_dim pad_token_id router_jitter_noise rope_scaling"
    yield Case("mixtral_gqa", mixtral())
    yield Case(
        "mixtral_window", mixtral(num_local_experts=4, num_hidden_layers=3, sliding_window=WINDOW)
    )
    yield Case("mixtral_legacy", mixtral(), "type", published, unpublished)


def qwen2_moe_cases() -> Iterator[Case]:
    """The legacy one is in the form of Qwen1.5-MoE-A2.7B; `sparse_step` has experts in the last of
    its 4 layers.
    """
    published = dict(max_window_layers=21, sliding_window=32768, transformers_version="4.39.0.dev0")
    unpublished = "mlp_only_layers pad_token_id qkv_bias rope_scaling"
    yield Case("qwen2_moe_shared_expert", qwen2_moe())
    yield Case("qwen2_moe_norm_topk_prob", qwen2_moe(norm_topk_prob=True))
    sparse = dict(decoder_sparse_step=2, mlp_only_layers=[1], num_hidden_layers=4)
    yield Case("qwen2_moe_sparse_step", qwen2_moe(**sparse))
    yield Case("qwen2_moe_legacy", qwen2_moe(num_key_value_heads=4), "type", published, unpublished)


def qwen3_moe_cases() -> Iterator[Case]:
    """The legacy one is in the form of Qwen3-30B-A3B. Three leave head_dim out: it is D/N, unlike
    Qwen3's.
    """
    published = dict(max_window_layers=48, num_experts=8, transformers_version="4.51.0")
    unpublished = "num_local_experts pad_token_id"
    yield Case("qwen3_moe_gqa", qwen3_moe())
    yield Case("qwen3_moe_no_norm_topk_prob", qwen3_moe(norm_topk_prob=False))
    yield Case("qwen3_moe_mlp_only_layers", qwen3_moe(mlp_only_layers=[1], num_hidden_layers=3))
    yield Case("qwen3_moe_tied", qwen3_moe(head_dim=8, tie_word_embeddings=True))
    yield Case("qwen3_moe_head_dim", qwen3_moe(head_dim=16))
    yield Case("qwen3_moe_legacy", qwen3_moe(head_dim=16), "type", published, unpublished)


def mla() -> dict[str, Any]:
    """4 heads of 8 + 16 dimensions and 12 for values; 12 experts, 3 for each token, after one dense
    layer.
    """
    heads = dict(
        num_key_value_heads=4,
        qk_nope_head_dim=8,
        qk_rope_head_dim=16,
        v_head_dim=12,
        kv_lora_rank=12,
    )
    experts = dict(
        n_routed_experts=12, num_experts_per_tok=3, moe_intermediate_size=8, first_k_dense_replace=1
    )
    return {**without_head_dim(), **heads, **experts, "num_hidden_layers": 3, "rms_norm_eps": 1e-6}


def deepseek_rope(mscale: float, mscale_all_dim: float) -> dict[str, Any]:
    """DeepSeek's factor and ints; context, theta and betas at which each figure shows in 16
    dimensions.
    """
    figures = dict(beta_fast=2, beta_slow=0.25, mscale=mscale, mscale_all_dim=mscale_all_dim)
    return rope("yarn", theta=1000, factor=40, original_max_position_embeddings=32, **figures)


def deepseek_v2(**fields: Any) -> DeepseekV2Config:
    """Two shared experts, weights that are not normalized."""
    sizes = dict(
        n_shared_experts=2, norm_topk_prob=False, rope_parameters=deepseek_rope(0.707, 0.707)
    )
    return DeepseekV2Config(**{**mla(), **sizes, **fields})


def deepseek_v3(**fields: Any) -> DeepseekV3Config:
    """One shared expert; 2 of 4 groups of experts, their weights normalized and then scaled by
    2.5."""
    groups = dict(
        n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5, n_shared_experts=1
    )
    figures = dict(q_lora_rank=16, rope_parameters=deepseek_rope(1.0, 1.0))
    return DeepseekV3Config(**{**mla(), **groups, **figures, **fields})


def remote_code(version: int) -> dict[str, str]:
    """The `auto_map` of DeepSeek's folders."""
    classes = dict(AutoConfig="Config", AutoModel="Model", AutoModelForCausalLM="ForCausalLM")
    files = {name: "configuration" if name == "AutoConfig" else "modeling" for name in classes}
    return {
        name: f"{files[name]}_deepseek.DeepseekV{version}{kind}" for name, kind in classes.items()
    }


def deepseek_v2_cases() -> Iterator[Case]:
    """`lite` and the legacy one are like DeepSeek-V2-Lite, `groups` is like DeepSeek-V2 but with
    unequal mscales.
    """
    one_group = dict(topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.0)
    lite = dict(q_lora_rank=None, n_routed_experts=8, **one_group)
    groups = dict(
        topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=4.0
    )
    training = dict(aux_loss_alpha=0.001, moe_layer_freq=1, scoring_func="softmax", seq_aux=True)
    published = dict(auto_map=remote_code(2), transformers_version="4.33.1", **training)
    unpublished = "head_dim mlp_bias output_router_logits pad_token_id qk_head_dim"
    yield Case("deepseek_v2_lite", deepseek_v2(**lite))
    unequal = deepseek_rope(1.0, 0.707)
    yield Case("deepseek_v2_groups", deepseek_v2(q_lora_rank=16, rope_parameters=unequal, **groups))
    small = deepseek_v2(**lite, v_head_dim=8, num_hidden_layers=2)
    yield Case("deepseek_v2_legacy", small, "type", published, unpublished)


def deepseek_r1_fields() -> dict[str, Any]:
    """Fields of DeepSeek-R1's config.json that transformers does not write."""
    training = dict(aux_loss_alpha=0.001, ep_size=1, moe_layer_freq=1, seq_aux=True)
    routing = dict(scoring_func="sigmoid", topk_method="noaux_tc")
    return dict(auto_map=remote_code(3), transformers_version="4.46.3", **training, **routing)


NOT_IN_DEEPSEEK_R1 = "head_dim output_router_logits pad_token_id qk_head_dim rope_interleave"


def deepseek_v3_cases() -> Iterator[Case]:
    """The legacy one is in the form of DeepSeek-R1, `plain_rope` is like Moonlight-16B-A3B."""
    one_group = dict(n_routed_experts=8, n_group=1, topk_group=1)
    figures = dict(q_lora_rank=None, rms_norm_eps=1e-5, rope_parameters=rope(theta=50000.0))
    yield Case("deepseek_v3_q_lora", deepseek_v3())
    yield Case("deepseek_v3_no_q_lora", deepseek_v3(q_lora_rank=None, num_hidden_layers=2))
    yield Case("deepseek_v3_plain_rope", deepseek_v3(**one_group, **figures))
    small = deepseek_v3(
        v_head_dim=8, num_hidden_layers=2, n_routed_experts=8, n_group=2, topk_group=1
    )
    yield Case(
        "deepseek_v3_legacy", small, "type", deepseek_r1_fields(), NOT_IN_DEEPSEEK_R1, mtp_layer(2)
    )


def gpt_oss(**fields: Any) -> GptOssConfig:
    """4 experts, 2 for each token; yarn without rounding to whole dimensions, its betas fit for 8
    of them.
    """
    sizes = dict(
        num_local_experts=4, num_experts_per_tok=2, intermediate_size=16, sliding_window=WINDOW
    )
    betas = dict(beta_fast=2.0, beta_slow=0.25, truncate=False)
    yarn = rope("yarn", theta=1000.0, factor=32.0, original_max_position_embeddings=32, **betas)
    return GptOssConfig(
        **{**tiny(), **sizes, "rms_norm_eps": 1e-5, "rope_parameters": yarn, **fields}
    )


def gpt_oss_fields() -> dict[str, Any]:
    """Fields of gpt-oss-20b's config.json that transformers does not write."""
    extra = dict(experts_per_token=2, initial_context_length=32, router_aux_loss_coef=0.9)
    kinds = ["sliding_attention", "full_attention"]
    return dict(layer_types=kinds, transformers_version="4.55.0.dev0", **extra)


NOT_IN_GPT_OSS = "bos_token_id swiglu_alpha torch_dtype"


def gpt_oss_cases() -> Iterator[Case]:
    """Sliding and whole layers by turns; the legacy one is in the form of gpt-oss-20b, but not
    quantized.
    """
    yield Case("gpt_oss_three_layers", gpt_oss(num_hidden_layers=3))
    yield Case("gpt_oss_head_dim", gpt_oss(head_dim=16, num_local_experts=8, num_experts_per_tok=4))
    yield Case(
        "gpt_oss_legacy", gpt_oss(head_dim=16), "rope_type", gpt_oss_fields(), NOT_IN_GPT_OSS
    )


def quantized_cases() -> Iterator[Case]:
    """Weights and config.json as DeepSeek-R1 and gpt-oss-20b have them, but for smaller blocks of
    fp8.
    """
    block = (16, 16)
    fp8_fields = dict(
        quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=block
    )
    r1 = {**deepseek_r1_fields(), "quantization_config": fp8_fields, "torch_dtype": "bfloat16"}
    yield Case("deepseek_v3_fp8", deepseek_v3(), "type", r1, NOT_IN_DEEPSEEK_R1, fp8(block))
    kept = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    gpt = {
        **gpt_oss_fields(),
        "quantization_config": dict(modules_to_not_convert=kept, quant_method="mxfp4"),
    }
    two_groups = gpt_oss(hidden_size=64, intermediate_size=64, head_dim=16)
    yield Case("gpt_oss_mxfp4", two_groups, "rope_type", gpt, NOT_IN_GPT_OSS, MXFP4)


def glm4_moe_cases() -> Iterator[Case]:
    """The first is like GLM-4.5, the second like GLM-4.5-Air but with groups of experts."""
    sizes = dict(
        num_hidden_layers=3,
        head_dim=16,
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        rope_parameters=rope(theta=1e4, partial_rotary_factor=0.5),
        routed_scaling_factor=2.5,
    )
    both = dict(use_qk_norm=True, attention_bias=True, first_k_dense_replace=1)
    yield Case("glm4_moe_norms_biases", Glm4MoeConfig(**{**tiny(), **sizes, **both}))
    groups = dict(n_group=4, topk_group=2, n_shared_experts=2, norm_topk_prob=False)
    yield Case("glm4_moe_groups", Glm4MoeConfig(**{**tiny(), **sizes, **groups}))


def glm4_moe_lite_cases() -> Iterator[Case]:
    """The first is like GLM-4.7-Flash, the second has two dense layers and queries in one step."""
    sizes = dict(n_routed_experts=8, n_group=1, topk_group=1, num_experts_per_tok=2)
    figures = dict(routed_scaling_factor=1.8, rms_norm_eps=1e-5, rope_parameters=rope(theta=1e4))
    lite = {**mla(), **sizes, **figures, "q_lora_rank": 16}
    lite.pop("first_k_dense_replace", None)
    yield Case("glm4_moe_lite", Glm4MoeLiteConfig(**lite))
    kinds = ["dense", "dense", "sparse"]
    more = dict(q_lora_rank=None, n_group=4, topk_group=2, n_shared_experts=2)
    listed = dict(num_hidden_layers=3, mlp_layer_types=kinds)
    yield Case("glm4_moe_lite_groups", Glm4MoeLiteConfig(**{**lite, **more, **listed}))


def minimax_m2_cases() -> Iterator[Case]:
    """Half of a head rotated, and all of it."""
    sizes = dict(head_dim=16, intermediate_size=12, num_local_experts=8, num_experts_per_tok=2)
    half = rope(theta=1e4, partial_rotary_factor=0.5)
    yield Case("minimax_m2_half", MiniMaxM2Config(**{**tiny(), **sizes, "rope_parameters": half}))
    whole = dict(rope_parameters=rope(theta=1e4), num_key_value_heads=4)
    yield Case("minimax_m2_whole", MiniMaxM2Config(**{**tiny(), **sizes, **whole}))


def half_rotated_cases() -> Iterator[Case]:
    """Forms of published files: GLM-4.5 has a factor beside rope_theta, MiniMax M2 a number."""
    half = rope(theta=1e4, partial_rotary_factor=0.5)
    common = dict(head_dim=16, num_experts_per_tok=2, rope_parameters=half)
    glm = dict(moe_intermediate_size=16, n_routed_experts=8, use_qk_norm=True)
    glm_config = Glm4MoeConfig(**{**tiny(), **common, **glm, "num_hidden_layers": 3})
    training = dict(num_nextn_predict_layers=1)
    yield Case("glm4_moe_legacy", glm_config, "rope_type", training, "num_mtp_layers")
    minimax = dict(intermediate_size=12, num_local_experts=8)
    published = dict(
        **dict(rotary_dim=8, attn_type_list=[1, 1], use_qk_norm=True, qk_norm_type="per_layer"),
        **dict(use_routing_bias=True, shared_intermediate_size=0, scoring_func="sigmoid"),
        **dict(use_mtp=True, num_mtp_modules=3, mtp_transformer_layers=1),
    )
    minimax_config = MiniMaxM2Config(**{**tiny(), **common, **minimax})
    yield Case("minimax_m2_legacy", minimax_config, "rope_type", published)


def granite_moe_cases() -> Iterator[Case]:
    """Stacked experts; the legacy one is in the form of published files."""
    sizes = {**without_head_dim(), "num_local_experts": 8, "num_experts_per_tok": 3}
    factors = granite_factors()
    theta = dict(rope_parameters=rope(theta=5e4))
    yield Case(
        "granite_moe_biases", GraniteMoeConfig(**sizes, **factors, **theta, attention_bias=True)
    )
    fewer = {**sizes, "num_local_experts": 6, "num_experts_per_tok": 2}
    yield Case("granite_moe_legacy", GraniteMoeConfig(**fewer, **factors, **theta), "rope_type")


def ernie4_5_moe_cases() -> Iterator[Case]:
    """A corrected choice by softmax scores; the second is like ERNIE-4.5-21B-A3B."""
    sizes = {**without_head_dim(), "moe_intermediate_size": 16, "moe_num_experts": 8, "moe_k": 2}
    theta = dict(rope_parameters=rope(theta=5e4))
    every_second = dict(num_hidden_layers=5, moe_layer_interval=2, moe_layer_end_index=3)
    yield Case(
        "ernie4_5_moe_every_second",
        Ernie4_5_MoeConfig(
            **{**sizes, **every_second},
            **theta,
            moe_num_shared_experts=0,
            tie_word_embeddings=False,
        ),
    )
    published = dict(
        moe_gate="topk",
        moe_use_aux_free=True,
        use_rmsnorm=True,
        num_nextn_predict_layers=1,
        multi_token_pred_lambda=0.3,
        moe_capacity=[8, 8, 8],
    )
    like_21b = Ernie4_5_MoeConfig(**sizes, **theta)
    yield Case("ernie4_5_moe_legacy", like_21b, "rope_type", published, "moe_layer_end_index")


def hunyuan_moe_cases() -> Iterator[Case]:
    """The legacy one is in the form of Hunyuan-A13B."""
    sizes = dict(num_experts=8, moe_topk=2)
    alpha = dict(rope_parameters=rope("dynamic", theta=5e2, alpha=20.0, factor=1.0))
    theta = dict(rope_parameters=rope(theta=5e4))
    yield Case(
        "hunyuan_moe_biases",
        HunYuanMoEV1Config(**{**tiny(), "head_dim": 16}, **sizes, **theta, attention_bias=True),
    )
    figures = dict(beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)
    scaling = dict(type="dynamic", alpha=20.0, factor=1.0, **figures)
    published = dict(
        rope_scaling=scaling,
        moe_topk=[2, 2],
        num_shared_expert=[1, 1],
        moe_intermediate_size=[24, 24],
        use_mixed_mlp_moe=True,
        norm_topk_prob=True,
        moe_layer_num_skipped=0,
        use_qk_norm=True,
        group_limited_greedy=False,
    )
    tied = HunYuanMoEV1Config(**tiny(), **sizes, **alpha, tie_word_embeddings=True)
    yield Case("hunyuan_moe_legacy", tied, "type", published)


def sparse_deepseek_cases() -> Iterator[Case]:
    """Indexers that choose as many tokens as the context has, and so all of them."""
    sizes = dict(index_topk=56, index_head_dim=16, index_n_heads=2)
    fields = {**mla(), **sizes, "q_lora_rank": 16, "n_routed_experts": 8, "n_group": 2}
    fields |= dict(topk_group=1, rope_parameters=deepseek_rope(1.0, 1.0), v_head_dim=8)
    yield Case("deepseek_v32_dense", DeepseekV32Config(**fields))
    shared = dict(indexer_types=["full", "shared", "full"], num_hidden_layers=3)
    plain = dict(rope_parameters=rope(theta=5e4), n_group=1)
    yield Case("glm5_dense", GlmMoeDsaConfig(**{**fields, **shared, **plain}))


def more_sparse_deepseek_cases() -> Iterator[Case]:
    """The same, with biases and other ropes; all layers of the second have an indexer."""
    sizes = dict(index_topk=64, index_head_dim=16, index_n_heads=4, q_lora_rank=12)
    fields = {**mla(), **sizes, "n_routed_experts": 8, "n_group": 1, "topk_group": 1}
    plain = dict(rope_parameters=rope(theta=5e4), attention_bias=True)
    yield Case("deepseek_v32_biases", DeepseekV32Config(**fields, **plain))
    groups = dict(n_group=2, routed_scaling_factor=1.5, norm_topk_prob=False)
    yield Case("glm5_biases", GlmMoeDsaConfig(**{**fields, **plain, **groups}))


def biased_glm4_moe_cases() -> Iterator[Case]:
    """Biases, but no norms of queries and keys, as GLM-4.5V has them; two dense layers."""
    sizes = dict(head_dim=16, moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2)
    half = rope(theta=1e4, partial_rotary_factor=0.5)
    biases = dict(attention_bias=True, first_k_dense_replace=2, num_hidden_layers=3)
    config = Glm4MoeConfig(**{**tiny(), **sizes, **biases}, rope_parameters=half)
    yield Case("glm4_moe_biases", config)


def late_deepseek_cases() -> Iterator[Case]:
    """Biases, rotated pairs in halves, layers that are all dense, and windows that are listed."""
    biases = dict(attention_bias=True, rope_interleave=False)
    yield Case("deepseek_v3_biases", deepseek_v3(**biases))
    dense = dict(q_lora_rank=None, first_k_dense_replace=3, num_hidden_layers=3)
    yield Case("deepseek_v3_all_dense", deepseek_v3(**biases, **dense))
    kinds = ["full_attention", "sliding_attention"]
    windows = dict(use_sliding_window=True, sliding_window=WINDOW, layer_types=kinds)
    yield Case("qwen2_moe_windows", qwen2_moe(**windows, moe_intermediate_size=16))


def moe_cases() -> Iterator[Case]:
    """New ones at the end: a case's number is its seed."""
    softmax_first = (mixtral_cases(), qwen2_moe_cases(), qwen3_moe_cases())
    return chain(
        *softmax_first,
        *(deepseek_v2_cases(), deepseek_v3_cases(), gpt_oss_cases(), quantized_cases()),
        *(glm4_moe_cases(), minimax_m2_cases(), glm4_moe_lite_cases()),
        *(half_rotated_cases(), granite_moe_cases(), ernie4_5_moe_cases(), hunyuan_moe_cases()),
        *(sparse_deepseek_cases(), late_deepseek_cases(), more_sparse_deepseek_cases()),
        biased_glm4_moe_cases(),
    )
