"""Tiny models with layers of recurrent state, whose golden answers make_goldens.py writes."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from golden_cases import Case, rope, tiny
from transformers import (  # pyright: ignore[reportMissingImports]
    Lfm2Config,
    Lfm2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

LINEAR, FULL = "linear_attention", "full_attention"


def hybrid(**fields: Any) -> dict[str, Any]:
    """Three layers, one of them with attention, of whose heads a quarter is rotated.

    The others have 4 key heads of 8 and 8 value heads of 12 numbers.
    """
    state = dict(
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
    )
    figures = dict(rms_norm_eps=1e-5, rope_parameters=quarter())
    layers = dict(num_hidden_layers=3, layer_types=[LINEAR, FULL, LINEAR])
    return {**tiny(), "head_dim": 16, **state, **figures, **layers, **fields}


def quarter(theta: float = 1e4) -> dict[str, Any]:
    return rope(theta=theta, partial_rotary_factor=0.25)


def experts() -> dict[str, Any]:
    """8 experts, 3 for each token, and a shared one."""
    sizes = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=12)
    return dict(**sizes, shared_expert_intermediate_size=20)


def qwen3_next_cases() -> Iterator[Case]:
    """The legacy one is in the form of Qwen3-Next-80B-A3B, with attention in every fourth layer."""
    yield Case("qwen3_next", Qwen3NextConfig(**hybrid(), **experts(), norm_topk_prob=True))
    sparse = dict(decoder_sparse_step=2, mlp_only_layers=[3], norm_topk_prob=False)
    fourth = dict(num_hidden_layers=4, layer_types=None, linear_conv_kernel_dim=2)
    fourth |= dict(rope_parameters=quarter(theta=1e2))
    config = Qwen3NextConfig(**hybrid(**fourth), **experts(), **sparse)
    published = dict(full_attention_interval=4, use_sliding_window=False)
    unpublished = "pad_token_id attention_bias num_local_experts"
    yield Case("qwen3_next_legacy", config, "type", published, unpublished)


def qwen3_5_cases() -> Iterator[Case]:
    """As many value heads as key heads with one embedding, as in Qwen3.5-0.8B; then three of each.

    The last is in the form of Qwen3.8-2.4T-A95B.
    """
    even = dict(linear_num_value_heads=4, linear_value_head_dim=8, tie_word_embeddings=True)
    yield Case("qwen3_5_tied", Qwen3_5TextConfig(**hybrid(**even)))
    yield Case("qwen3_5", Qwen3_5TextConfig(**hybrid(linear_num_value_heads=12)))
    sizes = {name: size for name, size in hybrid().items() if name != "intermediate_size"}
    config = Qwen3_5MoeTextConfig(**sizes, **experts())
    published = dict(
        attn_output_gate=True,
        full_attention_interval=4,
        mamba_ssm_dtype="float32",
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
        output_gate_type="swish",
        partial_rotary_factor=0.25,
    )
    yield Case("qwen3_5_moe", config, published=published)


def convolutions(**fields: Any) -> dict[str, Any]:
    """Three layers, one of them with attention; the others convolve over three tokens.

    As many kv heads as devices divide the convolved numbers among.
    """
    layers = dict(num_hidden_layers=3, layer_types=["conv", FULL, "conv"])
    sizes = {name: size for name, size in tiny().items() if name != "rms_norm_eps"}
    figures = dict(norm_eps=1e-5, rope_parameters=rope(theta=1e4))
    heads = dict(num_attention_heads=8, num_key_value_heads=4)
    return {**sizes, **figures, **heads, **layers, **fields}


def lfm2_cases() -> Iterator[Case]:
    """The dense legacy one is in the form of LFM2-1.2B, the one with experts of LFM2-8B-A1B."""
    yield Case("lfm2", Lfm2Config(**convolutions(block_multiple_of=8, block_ff_dim=72)))
    plain = dict(block_auto_adjust_ff_dim=False, conv_L_cache=4, block_ff_dim=40)
    attention = dict(layer_types=None, full_attn_idxs=[0, 2])
    config = Lfm2Config(**convolutions(**plain, **attention), tie_embedding=False)
    published = dict(block_ff_dim=40, conv_dim=32, conv_dim_out=32, num_heads=8)
    unpublished = "intermediate_size tie_word_embeddings"
    yield Case("lfm2_legacy", config, "type", published | {"tie_embedding": False}, unpublished)
    sizes = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=12)
    routed = dict(num_dense_layers=1, routed_scaling_factor=1.5)
    yield Case("lfm2_moe", Lfm2MoeConfig(**convolutions(**sizes, **routed)))


def state_cases() -> Iterator[Case]:
    """New ones at the end: a case's number is its seed.

    Products of states make much of rounding: of these models the steadier ones are taken.
    """
    cases = chain(qwen3_next_cases(), qwen3_5_cases(), lfm2_cases())
    return (replace(case, rounding=2e-5) for case in cases)
