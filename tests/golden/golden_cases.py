"""The models whose golden answers make_goldens.py writes: tiny configs, and the RoPE figures of
published ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from stored_weights import FP8_PER_TENSOR, Stored
from transformers import (  # pyright: ignore[reportMissingImports]
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)


@dataclass(frozen=True)
class Case:
    """One golden folder. `legacy` is the form of its config.json.

    None: as transformers writes it. "type" or "rope_type": rope_theta and rope_scaling at the top,
    the kind of scaling under that key. "minimal": the few fields of the first Llama checkpoints,
    the rest left to the defaults. "gemma3": a theta for each kind of layers at the top, and a
    pattern instead of layer_types. "olmo3": a theta at the top, and the scaling of layers without a
    window. A legacy config.json also has the fields `published` and lacks
    those named in `unpublished`. `stored` is the form of its model.safetensors, None: as
    transformers writes it.
    """

    name: str
    config: PretrainedConfig
    legacy: str | None = None
    published: dict[str, Any] = field(default_factory=dict)
    unpublished: str = ""
    stored: Stored | None = None
    rounding: float = 5e-5  # most that one pass may differ from cached steps; else another seed


def rope(rope_type: str = "default", theta: float = 10000.0, **figures: float) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": theta, **figures}


def tiny() -> dict[str, Any]:
    """4 query heads on 2 kv heads, N*H = D."""
    sizes = dict(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        max_position_embeddings=128,
    )
    return dict(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8)


def without_head_dim() -> dict[str, Any]:
    return {name: value for name, value in tiny().items() if name != "head_dim"}


def llama(**fields: Any) -> LlamaConfig:
    return LlamaConfig(**{**tiny(), "rms_norm_eps": 1e-5, "rope_parameters": rope(), **fields})


def qwen3(**fields: Any) -> Qwen3Config:
    return Qwen3Config(
        **{**tiny(), "rms_norm_eps": 1e-6, "rope_parameters": rope(theta=1e6), **fields}
    )


def llama3_rope() -> dict[str, Any]:
    """Wavelengths on both sides of the band and inside it, for H = 16 and sequences past the
    original 32.
    """
    return rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )


def yarn_rope() -> dict[str, Any]:
    """Its factor counts, not max_position_embeddings / original_max_position_embeddings: they
    differ, as in Qwen3.
    """
    return rope("yarn", theta=1000.0, factor=4.0, original_max_position_embeddings=24)


def tuned_yarn_rope() -> dict[str, Any]:
    betas = dict(attention_factor=1.3, beta_fast=2.0, beta_slow=0.25)
    return rope("yarn", theta=1000.0, factor=4.0, original_max_position_embeddings=32, **betas)


def llama_cases() -> Iterator[Case]:
    yield Case("llama_mha", llama(num_key_value_heads=4, num_hidden_layers=3))
    yield Case("llama_gqa", llama(rms_norm_eps=1e-6))
    yield Case("llama_mqa", llama(num_key_value_heads=1))
    yield Case("llama_tied", llama(tie_word_embeddings=True))
    yield Case("llama_attention_bias", llama(attention_bias=True))
    yield Case("llama_mlp_bias", llama(mlp_bias=True))
    yield Case("llama_head_dim", llama(head_dim=16))
    yield Case("llama_rope_theta", llama(rope_parameters=rope(theta=500.0)))
    yield Case("llama_rope_linear", llama(rope_parameters=rope("linear", factor=2.0)))
    yield Case("llama_rope_dynamic", llama(rope_parameters=rope("dynamic", factor=4.0)))
    yield Case("llama_rope_llama3", llama(head_dim=16, rope_parameters=llama3_rope()))
    yield Case("llama_rope_yarn", llama(head_dim=16, rope_parameters=yarn_rope()))
    yield Case("llama_rope_yarn_tuned", llama(head_dim=16, rope_parameters=tuned_yarn_rope()))


def qwen3_cases() -> Iterator[Case]:
    yield Case("qwen3_gqa", qwen3(num_hidden_layers=3))
    yield Case("qwen3_tied", qwen3(tie_word_embeddings=True))
    yield Case("qwen3_attention_bias", qwen3(attention_bias=True))
    yield Case("qwen3_head_dim", qwen3(head_dim=16))
    yield Case("qwen3_rope_yarn", qwen3(head_dim=16, rope_parameters=yarn_rope()))


def legacy_cases() -> Iterator[Case]:
    yield Case("llama_legacy_minimal", llama(num_key_value_heads=4), legacy="minimal")
    yield Case(
        "llama_legacy_type_linear",
        llama(rope_parameters=rope("linear", 5e3, factor=4.0)),
        legacy="type",
    )
    yield Case(
        "llama_legacy_rope_type_llama3",
        llama(head_dim=16, rope_parameters=llama3_rope()),
        legacy="rope_type",
    )
    yield Case(
        "qwen3_legacy_rope_type_yarn",
        qwen3(head_dim=16, rope_parameters=tuned_yarn_rope()),
        legacy="rope_type",
    )


WINDOW = 10  # shorter than the prompts, and no multiple of a page


def gemma(kind: type[PretrainedConfig], **fields: Any) -> PretrainedConfig:
    """Scores and logits large enough for the caps to show."""
    odd = dict(
        head_dim=16,
        num_hidden_layers=4,
        query_pre_attn_scalar=4,
        sliding_window=WINDOW,
        pad_token_id=None,
    )
    odd["rms_norm_eps"] = 1e-4  # the embeddings are scaled up: a smaller one would not show
    return kind(**{**tiny(), **odd, "hidden_activation": "gelu_pytorch_tanh", **fields})


def phi3(**fields: Any) -> Phi3Config:
    return Phi3Config(
        **{
            **tiny(),
            "rms_norm_eps": 1e-5,
            "pad_token_id": None,
            "rope_parameters": rope(),
            **fields,
        }
    )


def long_rope() -> dict[str, Any]:
    """12 of 16 dimensions rotated; the sequences end before the original context does."""
    short, long = [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], [1.0, 1.5, 2.5, 5.0, 9.0, 16.0]
    figures = dict(partial_rotary_factor=0.75, original_max_position_embeddings=64)
    return rope("longrope", short_factor=short, long_factor=long, **figures)


def window_cases() -> Iterator[Case]:
    """Mistral, and the window that Qwen keeps for the upper layers."""
    upper = dict(
        use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, num_hidden_layers=3
    )
    mistral = {**tiny(), "rms_norm_eps": 1e-5, "rope_parameters": rope()}
    yield Case("mistral_window", MistralConfig(**mistral, sliding_window=WINDOW))
    yield Case(
        "mistral_no_window", MistralConfig(**{**mistral, "head_dim": 16}, sliding_window=None)
    )
    yield Case(
        "mistral_legacy_rope_type",
        MistralConfig(**mistral, sliding_window=WINDOW),
        legacy="rope_type",
    )
    yield Case("qwen2_gqa", Qwen2Config(**tiny(), rope_parameters=rope(theta=1e6)))
    yield Case(
        "qwen2_tied",
        Qwen2Config(**tiny(), rope_parameters=rope(theta=1e6), tie_word_embeddings=True),
    )
    yield Case("qwen2_window", Qwen2Config(**{**tiny(), **upper}, rope_parameters=rope()))
    yield Case("qwen3_window", qwen3(**upper))


def gemma_cases() -> Iterator[Case]:
    caps = dict(attn_logit_softcapping=4.0, final_logit_softcapping=6.0)
    without = dict(attn_logit_softcapping=None, final_logit_softcapping=None)
    ropes = dict(
        full_attention=rope("linear", 1e6, factor=8.0), sliding_attention=rope(theta=500.0)
    )
    thirds = dict(
        layer_types=[
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ]
    )
    yield Case("gemma2_caps", gemma(Gemma2Config, rope_parameters=rope(), **caps))
    yield Case(
        "gemma2_no_caps",
        gemma(Gemma2Config, rope_parameters=rope(theta=500.0), attention_bias=True, **without),
    )
    yield Case("gemma3_two_ropes", gemma(Gemma3TextConfig, rope_parameters=ropes, **thirds))
    capped = dict(num_key_value_heads=1, final_logit_softcapping=6.0, sliding_window_pattern=2)
    yield Case("gemma3_final_cap", gemma(Gemma3TextConfig, rope_parameters=ropes, **capped))
    yield Case(
        "gemma3_legacy",
        gemma(Gemma3TextConfig, rope_parameters=ropes, sliding_window_pattern=3),
        "gemma3",
    )


def fused_and_post_norm_cases() -> Iterator[Case]:
    odd = dict(
        hidden_size=64, head_dim=16, max_position_embeddings=256, rope_parameters=long_rope()
    )
    yield Case("phi3_window", phi3(sliding_window=WINDOW))
    yield Case("phi3_mha_tied", phi3(num_key_value_heads=4, tie_word_embeddings=True))
    yield Case("phi3_longrope", phi3(**odd, original_max_position_embeddings=64))
    yield Case(
        "phi3_legacy_longrope", phi3(**odd, original_max_position_embeddings=64), legacy="type"
    )
    yield Case("olmo2_biases", Olmo2Config(**{**tiny(), "rms_norm_eps": 0.01}, attention_bias=True))
    yield Case("olmo2_gqa", Olmo2Config(**tiny(), rope_parameters=rope(theta=5e5)))
    yield Case(
        "olmo2_mha_tied",
        Olmo2Config(**{**tiny(), "num_key_value_heads": 4}, tie_word_embeddings=True),
    )


def wide_window_cases() -> Iterator[Case]:
    """A window over the whole context is none, but its layers still have the rope of their kind."""
    ropes = dict(full_attention=rope(theta=1e6), sliding_attention=rope(theta=500.0))
    wide = dict(sliding_window=128, sliding_window_pattern=2, rope_parameters=ropes)
    yield Case("gemma3_wide_window", gemma(Gemma3TextConfig, **wide))


def ministral3_cases() -> Iterator[Case]:
    """Queries grow at positions 24 and 48, and not in between."""

    def ministral3(**fields: Any) -> Ministral3Config:
        figures = dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.4)
        return Ministral3Config(
            **{**tiny(), "rope_parameters": {**yarn_rope(), **figures}, **fields}
        )

    yield Case("ministral3_gqa", ministral3(head_dim=16))
    yield Case(
        "ministral3_tied_window", ministral3(tie_word_embeddings=True, sliding_window=WINDOW)
    )


def ministral3_fp8_cases() -> Iterator[Case]:
    """Weights and quantization_config as Ministral-3-3B-Instruct has them."""
    figures = dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.4)
    config = Ministral3Config(**{**tiny(), "rope_parameters": {**yarn_rope(), **figures}})
    fields = dict(
        activation_scheme="static",
        dequantize=False,
        modules_to_not_convert=["lm_head"],
        quant_method="fp8",
        weight_block_size=None,
    )
    published = dict(quantization_config=fields)
    yield Case("ministral3_fp8", config, None, published, stored=FP8_PER_TENSOR)


def no_rope_cases() -> Iterator[Case]:
    """Layers without a rope: SmolLM3's, which may have the windows, and EXAONE 4's, which do not.

    The second SmolLM3 and EXAONE 4 are in the form of published files.
    """
    sizes = {**without_head_dim(), "num_hidden_layers": 4}
    theta = dict(rope_parameters=rope(theta=5e4), pad_token_id=0)
    yield Case(
        "smollm3_windows",
        SmolLM3Config(
            **sizes,
            **theta,
            no_rope_layer_interval=2,
            use_sliding_window=True,
            sliding_window=WINDOW,
            tie_word_embeddings=False,
        ),
    )
    published = dict(pretraining_tp=2, max_window_layers=4)
    flags = dict(no_rope_layers=[1, 0, 1, 1])
    yield Case("smollm3_legacy", SmolLM3Config(**sizes, **theta, **flags), "type", published)
    norms = dict(rms_norm_eps=1e-5)
    yield Case(
        "exaone4_no_window",
        Exaone4Config(
            **{**tiny(), "head_dim": 16},
            **norms,
            rope_parameters=llama3_rope(),
            sliding_window=None,
            layer_types=["full_attention"] * 2,
        ),
    )
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    hybrid = Exaone4Config(
        **{**tiny(), "num_hidden_layers": 3},
        **norms,
        **theta,
        sliding_window=WINDOW,
        layer_types=kinds,
        tie_word_embeddings=True,
    )
    published = dict(layer_types=kinds, sliding_window_pattern="LLG")
    yield Case("exaone4_legacy", hybrid, "rope_type", published)


def granite_factors() -> dict[str, float]:
    """Return the factors of Granite, each far from the one that has no effect."""
    return dict(
        embedding_multiplier=1.5,
        rms_norm_eps=1e-5,
        attention_multiplier=0.3,
        residual_multiplier=0.6,
        logits_scaling=2.0,
    )


def llama_like_cases() -> Iterator[Case]:
    """Families that differ from Llama in biases or factors; the legacy ones are as published."""
    theta = dict(rope_parameters=rope(theta=5e4))
    published = dict(pretraining_tp=1, residual_dropout=0.1)
    yield Case(
        "seed_oss_all_biases",
        SeedOssConfig(
            **{**tiny(), "head_dim": 16},
            **theta,
            attention_out_bias=True,
            mlp_bias=True,
        ),
    )
    yield Case("seed_oss_legacy", SeedOssConfig(**tiny(), **theta), "rope_type", published)
    sizes = without_head_dim()
    factors = granite_factors()
    yield Case(
        "granite_biases",
        GraniteConfig(**sizes, **theta, **factors, attention_bias=True, mlp_bias=True),
    )
    yield Case(
        "granite_legacy",
        GraniteConfig(**sizes, **theta, **factors, tie_word_embeddings=True),
        "rope_type",
    )


def olmo3_cases() -> Iterator[Case]:
    """A theta for each kind of layers, and YaRN without a window alone, as published."""
    sizes = {**without_head_dim(), "num_hidden_layers": 4}
    both = dict(full_attention=rope(theta=1e6), sliding_attention=rope(theta=500.0))
    fields = dict(sliding_window=WINDOW, rms_norm_eps=1e-6)
    of_two = dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    yield Case(
        "olmo3_biases",
        Olmo3Config(
            **{**sizes, **fields, **of_two, "rms_norm_eps": 0.01},
            attention_bias=True,
            rope_parameters=both,
        ),
    )
    yield Case("olmo3_two_ropes", Olmo3Config(**sizes, **fields, rope_parameters=both))
    # transformers 5.24 gives layers with a window this theta, whatever a file in this form has.
    theta = dict(rope_theta=500000.0)
    both = dict(full_attention={**yarn_rope(), **theta}, sliding_attention=rope(theta=500000.0))
    heads = dict(num_attention_heads=2, num_key_value_heads=1)
    scaled = Olmo3Config(**{**sizes, **heads}, **fields, rope_parameters=both)
    yield Case("olmo3_legacy", scaled, "olmo3")


def neighbour_cases() -> Iterator[Case]:
    """Rotated pairs beside each other: in half of a head (GLM-4), and in all of it (ERNIE 4.5)."""
    half = dict(
        head_dim=16, pad_token_id=0, rope_parameters=rope(theta=5e4, partial_rotary_factor=0.5)
    )
    yield Case("glm_mqa", GlmConfig(**{**tiny(), **half, "num_key_value_heads": 1}))
    yield Case("glm_legacy", GlmConfig(**{**tiny(), **half}, attention_bias=False), "rope_type")
    yield Case("glm4_gqa", Glm4Config(**{**tiny(), **half}, rms_norm_eps=1e-5))
    like_9b = {**tiny(), **half, "hidden_size": 64}  # as wide as all heads
    yield Case("glm4_legacy", Glm4Config(**like_9b, rms_norm_eps=1e-5), "rope_type")
    theta = dict(rope_parameters=rope(theta=5e4))
    yield Case(
        "ernie4_5_biases",
        Ernie4_5Config(
            **{**tiny(), "head_dim": 16}, **theta, use_bias=True, tie_word_embeddings=False
        ),
    )
    yield Case("ernie4_5_legacy", Ernie4_5Config(**tiny(), **theta), "rope_type")


def hunyuan_cases() -> Iterator[Case]:
    """Norms behind the rope; the legacy one has the rope of published files."""
    theta = dict(rope_parameters=rope(theta=5e4))
    yield Case(
        "hunyuan_biases",
        HunYuanDenseV1Config(**{**tiny(), "head_dim": 16}, **theta, attention_bias=True),
    )
    alpha = dict(rope_parameters=rope("dynamic", theta=5e2, alpha=20.0, factor=1.0))
    published = dict(attention_head_dim=8, use_qk_norm=True, use_cla=False, cla_share_factor=2)
    yield Case(
        "hunyuan_legacy",
        HunYuanDenseV1Config(**tiny(), **alpha, tie_word_embeddings=True),
        "type",
        published,
    )


def ministral_cases() -> Iterator[Case]:
    """Layers with and without a window by turns, as Ministral 8B has them."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    fields = dict(num_hidden_layers=3, sliding_window=WINDOW, layer_types=kinds)
    config = MinistralConfig(**{**tiny(), **fields}, rope_parameters=rope(theta=5e4))
    yield Case("ministral_layer_types", config)


def tied_ministral_cases() -> Iterator[Case]:
    """A window in every layer, heads that are wider than the model, and one embedding."""
    fields = dict(head_dim=16, tie_word_embeddings=True, sliding_window=WINDOW)
    config = MinistralConfig(**{**tiny(), **fields}, rope_parameters=rope(theta=5e4))
    yield Case("ministral_tied_window", config)


def biased_glm4_cases() -> Iterator[Case]:
    """Heads that are together as wide as the model, and biases, as GLM-4.1V has them."""
    half = rope(theta=5e4, partial_rotary_factor=0.5)
    sizes = dict(head_dim=16, hidden_size=64, num_key_value_heads=4, pad_token_id=0)
    config = Glm4Config(**{**tiny(), **sizes}, rope_parameters=half, attention_bias=True)
    yield Case("glm4_biases", config)


def gemma_first_cases() -> Iterator[Case]:
    """The second is in the form of gemma-2b: one kv head, and the old name of the activation."""
    theta = dict(rope_parameters=rope(theta=1e4), rms_norm_eps=1e-4)
    biases = dict(attention_bias=True, tie_word_embeddings=False, head_dim=16)
    yield Case("gemma_biases", GemmaConfig(**{**tiny(), **biases}, **theta))
    config = GemmaConfig(**{**tiny(), "num_key_value_heads": 1}, **theta)
    yield Case("gemma_legacy", config, "type", dict(hidden_act="gelu"))


def all_cases() -> Iterator[Case]:
    """New ones at the end: a case's number is its seed."""
    later = (
        *(window_cases(), gemma_cases(), fused_and_post_norm_cases(), wide_window_cases()),
        *(ministral3_cases(), no_rope_cases(), llama_like_cases(), olmo3_cases()),
        *(neighbour_cases(), hunyuan_cases(), ministral_cases()),
        *(ministral3_fp8_cases(), gemma_first_cases(), tied_ministral_cases()),
        biased_glm4_cases(),
    )
    return chain(llama_cases(), qwen3_cases(), legacy_cases(), *later)


def published_ropes() -> dict[str, LlamaConfig]:
    """RoPE figures of published checkpoints; the linear, dynamic and yarn_tuned figures are
    ours."""
    llama2 = dict(hidden_size=4096, num_attention_heads=32, max_position_embeddings=4096)
    long = {**llama2, "max_position_embeddings": 131072}
    qwen3_4b = dict(
        hidden_size=2560, num_attention_heads=32, head_dim=128, max_position_embeddings=40960
    )
    llama3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    small = {**long, "hidden_size": 2048, "head_dim": 64}
    yarn = dict(factor=4.0, original_max_position_embeddings=32768)
    betas = dict(attention_factor=1.25, beta_fast=16.0, beta_slow=2.0)
    ropes = {
        "llama-2-7b": (llama2, rope()),
        "llama-2-7b linear 2": (llama2, rope("linear", factor=2.0)),
        "llama-2-7b dynamic 2": (llama2, rope("dynamic", factor=2.0)),
        "llama-3-8b": ({**llama2, "max_position_embeddings": 8192}, rope(theta=500000.0)),
        "llama-3.1-8b": (long, rope("llama3", 500000.0, factor=8.0, **llama3)),
        "llama-3.2-1b": (small, rope("llama3", 500000.0, factor=32.0, **llama3)),
        "qwen3-4b": (qwen3_4b, rope(theta=1e6)),
        "qwen3-4b yarn 4": (qwen3_4b, rope("yarn", 1e6, **yarn)),
        "qwen3-4b yarn_tuned": (qwen3_4b, rope("yarn", 1e6, **yarn, **betas)),
    }
    return {
        name: LlamaConfig(**fields, rope_parameters=figures)
        for name, (fields, figures) in ropes.items()
    }
