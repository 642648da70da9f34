"""Tiny mixture-of-experts models whose golden answers make_goldens.py writes."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from golden_cases import WINDOW, Case, rope, tiny
from transformers import (  # pyright: ignore[reportMissingImports]
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)


def without_head_dim() -> dict[str, Any]:
    return {name: value for name, value in tiny().items() if name != "head_dim"}


def mixtral(**fields: Any) -> MixtralConfig:
    sizes = {**tiny(), "intermediate_size": 12, "num_local_experts": 8, "num_experts_per_tok": 2}
    return MixtralConfig(**{**sizes, "rms_norm_eps": 1e-5, "rope_parameters": rope(theta=1e6), **fields})


def qwen2_moe(**fields: Any) -> Qwen2MoeConfig:
    """6 experts, 3 for each token, and a shared expert; qkv biases, which its config takes for granted."""
    sizes = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=12, shared_expert_intermediate_size=20)
    figures = dict(rms_norm_eps=1e-6, rope_parameters=rope(theta=1e6))
    return Qwen2MoeConfig(**{**without_head_dim(), **sizes, **figures, **fields})


def qwen3_moe(**fields: Any) -> Qwen3MoeConfig:
    """8 experts, 3 for each token, their weights normalized as when published (not the default of the config)."""
    sizes = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=12, norm_topk_prob=True)
    figures = dict(rms_norm_eps=1e-6, rope_parameters=rope(theta=1e6))
    return Qwen3MoeConfig(**{**without_head_dim(), **sizes, **figures, **fields})


def mixtral_cases() -> Iterator[Case]:
    """The legacy one is in the form of Mixtral-8x7B-v0.1."""
    published = dict(router_aux_loss_coef=0.02, transformers_version="4.36.0.dev0")
    unpublished = "head_dim pad_token_id router_jitter_noise rope_scaling"
    yield Case("mixtral_gqa", mixtral())
    yield Case("mixtral_window", mixtral(num_local_experts=4, num_hidden_layers=3, sliding_window=WINDOW))
    yield Case("mixtral_legacy", mixtral(), "type", published, unpublished)


def qwen2_moe_cases() -> Iterator[Case]:
    """The legacy one is in the form of Qwen1.5-MoE-A2.7B; `sparse_step` has experts in the last of its 4 layers."""
    published = dict(max_window_layers=21, sliding_window=32768, transformers_version="4.39.0.dev0")
    unpublished = "mlp_only_layers pad_token_id qkv_bias rope_scaling"
    yield Case("qwen2_moe_shared_expert", qwen2_moe())
    yield Case("qwen2_moe_norm_topk_prob", qwen2_moe(norm_topk_prob=True))
    sparse = dict(decoder_sparse_step=2, mlp_only_layers=[1], num_hidden_layers=4)
    yield Case("qwen2_moe_sparse_step", qwen2_moe(**sparse))
    yield Case("qwen2_moe_legacy", qwen2_moe(num_key_value_heads=4), "type", published, unpublished)


def qwen3_moe_cases() -> Iterator[Case]:
    """The legacy one is in the form of Qwen3-30B-A3B. Three leave head_dim to the default: D/N, unlike Qwen3's."""
    published = dict(max_window_layers=48, num_experts=8, transformers_version="4.51.0")
    unpublished = "num_local_experts pad_token_id"
    yield Case("qwen3_moe_gqa", qwen3_moe())
    yield Case("qwen3_moe_no_norm_topk_prob", qwen3_moe(norm_topk_prob=False))
    yield Case("qwen3_moe_mlp_only_layers", qwen3_moe(mlp_only_layers=[1], num_hidden_layers=3))
    yield Case("qwen3_moe_tied", qwen3_moe(head_dim=8, tie_word_embeddings=True))
    yield Case("qwen3_moe_head_dim", qwen3_moe(head_dim=16))
    yield Case("qwen3_moe_legacy", qwen3_moe(head_dim=16), "type", published, unpublished)


def moe_cases() -> Iterator[Case]:
    """New ones at the end: a case's number is its seed."""
    return chain(mixtral_cases(), qwen2_moe_cases(), qwen3_moe_cases())
