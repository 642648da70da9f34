"""Published config.json files: every field is understood, and parameters are counted right."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve import plan
from jaxserve.errors import ModelError
from jaxserve.loading.spec import read_spec
from jaxserve.models.decoder import param_specs
from jaxserve.models.rope import LongRope
from jaxserve.models.spec import ModelSpec
from jaxserve.sharding.params import is_param_spec, map_specs

GOLDEN = Path(__file__).parents[2] / "golden"
COMMON = {
    "initializer_range": 0.02,
    "use_cache": True,
    "attention_dropout": 0.0,
    "transformers_version": "4.44.0",
}


def sizes(
    d: int, mlp: int, layers: int, heads: int, kv: int, vocab: int, positions: int
) -> dict[str, Any]:
    return {
        "hidden_size": d,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
    }


LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **sizes(4096, 14336, 32, 32, 8, 128256, 8192),
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "pretraining_tp": 1,
    "tie_word_embeddings": False,
}
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **sizes(576, 1536, 30, 9, 3, 49152, 8192),
    "hidden_act": "silu",
    "is_llama_config": True,
    "rms_norm_eps": 1e-5,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
}
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    **sizes(4096, 12288, 36, 32, 8, 151936, 40960),
    "head_dim": 128,
    "hidden_act": "silu",
    "max_window_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "attention_bias": False,
}
MISTRAL_7B_V01 = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    **sizes(4096, 14336, 32, 32, 8, 32000, 32768),
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
}
MISTRAL_7B_V03 = {
    **MISTRAL_7B_V01,
    "vocab_size": 32768,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    **sizes(3584, 18944, 28, 28, 4, 152064, 131072),
    "hidden_act": "silu",
    "max_window_layers": 28,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_mrope": False,
    "use_sliding_window": False,
}
GEMMA_2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    **sizes(2304, 9216, 26, 8, 4, 256000, 8192),
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    **sizes(1152, 6912, 26, 4, 1, 262144, 32768),
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
PHI_3_MINI_4K = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    **sizes(3072, 8192, 32, 32, 32, 32064, 4096),
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "hidden_act": "silu",
    "original_max_position_embeddings": 4096,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
}
LONG_ROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 48,
    "long_factor": [1.0 + i for i in range(48)],
}
PHI_4_MINI = {
    **PHI_3_MINI_4K,
    **sizes(3072, 8192, 32, 24, 8, 200064, 131072),
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 0.75,
    "rope_scaling": LONG_ROPE,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
}
OLMO_2_7B = {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    **sizes(4096, 11008, 32, 32, 32, 100352, 4096),
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
}
LFM2_1_2B = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-5,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
# LFM2.5 names the kinds of layers, and the size before block_auto_adjust_ff_dim as others do.
LFM2_5_350M = {
    **{
        name: value
        for name, value in LFM2_1_2B.items()
        if name not in ("conv_dim_out", "num_heads")
    },
    "block_dim": 1024,
    "block_ff_dim": None,
    "conv_dim": 1024,
    "full_attn_idxs": None,
    "hidden_size": 1024,
    "intermediate_size": 6656,
    "layer_types": [
        "full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)
    ],
    "num_attention_heads": 16,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "tie_embedding": True,
}
LFM2_8B_A1B = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "conv_L_cache": 3,
    "conv_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": [
        "full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)
    ],
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-5,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
    "vocab_size": 65536,
}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama 3 8B": (LLAMA_3_8B, 8_030_261_248),
    "SmolLM2 135M": (SMOLLM2_135M, 134_515_008),
    "Qwen3 8B": (QWEN3_8B, 8_190_735_360),
    "Mistral 7B v0.1": (MISTRAL_7B_V01, 7_241_732_096),
    "Mistral 7B v0.3": (MISTRAL_7B_V03, 7_248_023_552),
    "Qwen2.5 7B": (QWEN25_7B, 7_615_616_512),
    "Gemma 2 2B": (GEMMA_2_2B, 2_614_341_888),
    "Gemma 3 1B": (GEMMA_3_1B, 999_885_952),
    "Phi-3 mini 4k": (PHI_3_MINI_4K, 3_821_079_552),
    "Phi-4 mini": (PHI_4_MINI, 3_836_021_760),
    "OLMo 2 7B": (OLMO_2_7B, 7_298_617_344),
    "LFM2 1.2B": (LFM2_1_2B, 1_170_340_608),
    "LFM2.5 350M": (LFM2_5_350M, 354_483_968),
    # The biases of the choice of experts are no parameters there.
    "LFM2 8B-A1B": (LFM2_8B_A1B, 8_339_929_856 + 22 * 32),
}


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return read_spec(COMMON | config)[1]


@pytest.mark.parametrize(("config", "parameters"), PUBLISHED.values(), ids=PUBLISHED)
def test_every_field_is_understood_and_the_parameters_are_as_published(
    config: dict[str, Any], parameters: int
) -> None:
    counted = 0

    def count(param) -> None:
        nonlocal counted
        counted += math.prod(param.shape)

    map_specs(count, param_specs(spec_of(config), jnp.dtype(jnp.bfloat16)))
    assert counted == parameters


def test_page_groups() -> None:
    def groups(config: dict[str, Any]) -> list[tuple[int | None, int]]:
        return [(group.window, len(group.layers)) for group in spec_of(config).page_groups()]

    assert groups(MISTRAL_7B_V01) == [(4096, 32)] and groups(MISTRAL_7B_V03) == [(None, 32)]
    assert groups(GEMMA_2_2B) == [(4096, 13), (None, 13)]
    assert groups(GEMMA_3_1B) == [(512, 22), (None, 4)]
    assert groups(PHI_3_MINI_4K) == [(2047, 32)] and groups(PHI_4_MINI) == [(None, 32)], (
        "a window over all is none"
    )
    assert groups(QWEN25_7B) == [(None, 28)], "a window that is not in use"


def test_null_and_absent_kv_heads() -> None:
    absent = {
        name: value for name, value in MISTRAL_7B_V01.items() if name != "num_key_value_heads"
    }
    assert (
        spec_of(absent).num_kv_heads == 8
        and spec_of(absent | {"num_key_value_heads": None}).num_kv_heads == 32
    )


def test_long_rope_ends_at_the_original_context() -> None:
    spec = spec_of(PHI_4_MINI)
    assert spec.max_positions == 4096 and isinstance(spec.rope, LongRope)
    assert spec.rope.factor == 32 and spec.rope.dimensions(spec.head_dim) == 96


REFUSED = [
    (QWEN25_7B, {"use_mrope": True}, "use_mrope = True is not implemented"),
    (
        QWEN25_7B,
        {"layer_types": ["linear_attention"] * 28},
        "layer_types has linear_attention; implemented are",
    ),
    (
        QWEN25_7B,
        {"layer_types": ["full_attention"] * 27},
        "layer_types has 27 layers; the model has 28",
    ),
    (SMOLLM2_135M, {"rope_interleaved": True}, "rope_interleaved = True is not implemented"),
    (
        LLAMA_3_8B,
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor is not implemented",
    ),
    (GEMMA_2_2B, {"hidden_activation": "relu"}, "hidden_activation = 'relu' is not implemented"),
    (
        GEMMA_2_2B,
        {"final_logit_softcapping": -1.0},
        "final_logit_softcapping is -1; it must be a positive number",
    ),
    (
        GEMMA_3_1B,
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping = 50.0 is not implemented",
    ),
    (GEMMA_3_1B, {"sliding_window": 0}, "sliding_window is 0; it must be an integer of at least 1"),
    (PHI_4_MINI, {"partial_rotary_factor": 1.5}, "it must be at most 1"),
    (LFM2_1_2B, {"conv_bias": True}, "conv_bias = True is not implemented"),
    (LFM2_1_2B, {"conv_dim": 1024}, "conv_dim = 1024 is not implemented"),
    (LFM2_1_2B, {"full_attn_idxs": [16]}, "must list layers, from 0 to 15"),
    (LFM2_1_2B, {"conv_L_cache": 1}, "taps is 1; it must be at least 2"),
    (LFM2_1_2B, {"num_key_value_heads": 5}, "2048 does not divide by 5 kv heads"),
    (LFM2_1_2B, {"rms_norm_eps": 1e-6}, "rms_norm_eps"),
    (PHI_4_MINI, {"partial_rotary_factor": 0.5}, "48 factors for 32 pairs of rotated dimensions"),
    (
        PHI_4_MINI,
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": []}},
        "short_factor has 1 numbers and long_factor 0; they have to be as many",
    ),
    (OLMO_2_7B, {"attention_bias": 1}, "attention_bias is 1, not of the type"),
    (
        LLAMA_3_8B,
        {"num_hidden_layers": 10**18},
        "num_hidden_layers is 1000000000000000000; at most 1024 are supported",
    ),
    (
        LLAMA_3_8B,
        {"num_attention_heads": 2**30},
        "num_attention_heads is 1073741824; at most 4096 are supported",
    ),
    (
        LLAMA_3_8B,
        {"vocab_size": 2**63},
        "vocab_size is 9223372036854775808; at most 2147483647 are supported",
    ),
    (
        GEMMA_2_2B,
        {"query_pre_attn_scalar": 0},
        "query_pre_attn_scalar is 0; it must be a positive number",
    ),
    (
        GEMMA_3_1B,
        {"query_pre_attn_scalar": -1},
        "query_pre_attn_scalar is -1; it must be a positive number",
    ),
    (
        LLAMA_3_8B,
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4,
                "original_max_position_embeddings": float("inf"),
            }
        },
        "original_max_position_embeddings is inf; it must be an integer of at least 1",
    ),
]


@pytest.mark.parametrize(
    ("config", "fields", "message"), REFUSED, ids=[message for *_, message in REFUSED]
)
def test_refused(config: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        spec_of(config | fields)
    assert "\n" not in str(caught.value)


QWEN3_5_MOE = json.loads((GOLDEN / "qwen3_5_moe" / "config.json").read_text())
STATES_REFUSED = [
    ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not implemented"),
    ({"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\] is not implemented"),
    ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid' is not implemented"),
    ({"linear_num_value_heads": 7}, "7 value heads do not divide by 4 key heads"),
    ({"linear_conv_kernel_dim": 1}, "taps is 1; it must be at least 2"),
    (
        {"layer_types": ["linear_attention"] * 3},
        "a model whose layers all have a state is not implemented",
    ),
    (
        {"layer_types": ["full_attention", "sliding_attention", "linear_attention"]},
        "layer_types has sliding_attention; implemented are full_attention and linear_attention",
    ),
]


@pytest.mark.parametrize(
    ("fields", "message"), STATES_REFUSED, ids=[message for _, message in STATES_REFUSED]
)
def test_states_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_of(QWEN3_5_MOE | fields)


def test_a_text_part_may_say_that_it_has_a_tower() -> None:
    config = json.loads((GOLDEN / "qwen3_5_images" / "config.json").read_text())
    assert spec_of(config | {"language_model_only": False}) == spec_of(config)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 4608),
        ({"block_ffn_dim_multiplier": None}, 4437),
        ({"block_ffn_dim_multiplier": 1.5}, 6656),
        ({"block_auto_adjust_ff_dim": False}, 6656),
    ],
)
def test_the_size_that_lfm2_makes_of_its_figures(fields: dict[str, Any], size: int) -> None:
    assert spec_of(LFM2_5_350M | fields).d_mlp == size


MIXTURES_REFUSED = [
    ("deepseek-v3", {"topk_method": "random"}, "topk_method = 'random' is not implemented"),
    ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not implemented"),
    ("deepseek-v3", {"n_group": 3}, "256 experts do not divide into 3 groups"),
    ("deepseek-v3", {"topk_group": 9}, "9 of 8 groups of experts are taken"),
    (
        "deepseek-v3",
        {"num_experts_per_tok": 200},
        "200 experts per token are more than 4 of 8 groups of 256",
    ),
    ("deepseek-v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
    ("deepseek-v3", {"num_key_value_heads": 8}, "num_key_value_heads = 8 is not implemented"),
    ("deepseek-v3", {"rope_scaling": {"type": "yarn", "factor": 4, "wobble": 1}}, "wobble"),
    ("gpt-oss-20b", {"swiglu_alpha": 2.0}, "swiglu_alpha = 2.0 is not implemented"),
    ("gpt-oss-20b", {"swiglu_limit": -7.0}, "swiglu_limit is -7; it must be a positive number"),
    ("gpt-oss-20b", {"experts_per_token": 2}, "num_experts_per_tok is 4 and experts_per_token 2"),
    ("gpt-oss-20b", {"rope_scaling": None}, "lacks 'rope_scaling'"),
    ("deepseek-v3", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1; it must be 0 to"),
    ("deepseek-v3", {"norm_topk_prob": None}, "norm_topk_prob = None is not implemented"),
    (
        "mixtral-8x7b",
        {"num_experts_per_tok": 9},
        "9 experts per token are more than 1 of 1 groups of 8",
    ),
    (
        "mixtral-8x7b",
        {"num_local_experts": 2**20},
        "num_local_experts is 1048576; at most 16384 are supported",
    ),
    (
        "qwen3-30b-a3b",
        {"use_sliding_window": True},
        "use_sliding_window without layer_types is not",
    ),
    (
        "qwen3-30b-a3b",
        {"decoder_sparse_step": 100},
        "a mixture with experts of size 768 in 0 layers",
    ),
]


@pytest.mark.parametrize(
    ("name", "fields", "message"), MIXTURES_REFUSED, ids=[m for *_, m in MIXTURES_REFUSED]
)
def test_mixtures_that_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        spec_of(shipped_config(name) | fields)
    assert "\n" not in str(caught.value)


SHIPPED = {  # of what `jaxserve plan` knows by name: parameters as published
    "deepseek-v3": 671_026_419_200,
    "gemma3-27b": 27_009_346_304,  # without its vision tower
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3.5-27b": 26_895_998_464,  # without its vision tower and the layer that drafts
}


def shipped_config(name: str) -> dict[str, Any]:
    return json.loads((Path(plan.__file__).parent / "configs" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_have_the_published_number_of_parameters(name: str) -> None:
    config = shipped_config(name)
    leaves = jax.tree.leaves(
        param_specs(spec_of(config), jnp.dtype(jnp.bfloat16)), is_leaf=is_param_spec
    )
    assert sum(math.prod(leaf.shape) for leaf in leaves) == SHIPPED[name]


def test_every_shipped_config_is_looked_at() -> None:
    assert {path.stem for path in (Path(plan.__file__).parent / "configs").glob("*.json")} == set(
        SHIPPED
    )
