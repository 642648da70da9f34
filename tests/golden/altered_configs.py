"""Configs with one figure changed: a model built from one answers differently."""

import copy
from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig  # pyright: ignore[reportMissingImports]

FIGURES = (
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "swiglu_limit",
    "rope_interleave",
    "routed_scaling_factor",
    "norm_topk_prob",
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
UNREAD = ("deepseek_v2", "norm_topk_prob")  # transformers never normalizes there
WITHOUT_EFFECT = {  # figure, kind of rope
    ("factor", "dynamic"),
    ("long_factor", "longrope"),
    ("partial_rotary_factor", "longrope"),
}


def changed(figure: Any) -> Any:
    """Return a flag turned round, a number doubled, or a list with each of its figures changed."""
    if isinstance(figure, list):
        return [changed(x) for x in figure]
    return not figure if isinstance(figure, bool) else 2 * figure


def with_figure(config: PretrainedConfig, name: str, figure: Any) -> PretrainedConfig:
    altered = copy.deepcopy(config)
    setattr(altered, name, figure)
    return altered


def altered_configs(config: PretrainedConfig) -> Iterator[tuple[str, PretrainedConfig]]:
    """Yield configs with one figure changed, and its name.

    "dynamic" RoPE is plain RoPE inside max_position_embeddings.
    """
    eps = "rms_norm_eps" if hasattr(config, "rms_norm_eps") else "norm_eps"
    yield eps, with_figure(config, eps, 10 * getattr(config, eps))
    if getattr(config, "first_k_dense_replace", 0) >= config.num_hidden_layers:
        yield from altered_ropes(config)  # figures of experts mean nothing
        return
    for name in FIGURES:
        unread = (config.model_type, name) == UNREAD
        if getattr(config, name, None) is not None and not unread:
            yield name, with_figure(config, name, changed(getattr(config, name)))
    longest = config.max_position_embeddings
    if (getattr(config, "sliding_window", None) or longest) < longest:
        yield "sliding_window", with_figure(config, "sliding_window", config.sliding_window + 1)
    if hasattr(config, "num_experts_per_tok"):
        yield (
            "num_experts_per_tok",
            with_figure(config, "num_experts_per_tok", config.num_experts_per_tok - 1),
        )
    if hasattr(config, "no_rope_layers"):
        flags = [1 - flag for flag in config.no_rope_layers]
        yield "no_rope_layers", with_figure(config, "no_rope_layers", flags)
    if (getattr(config, "n_group", None) or 1) > 1:
        yield "n_group", with_figure(config, "n_group", config.n_group // 2)
        yield "topk_group", with_figure(config, "topk_group", config.topk_group + 1)
    yield from altered_ropes(config)


def altered_ropes(config: PretrainedConfig) -> Iterator[tuple[str, PretrainedConfig]]:
    """Yield configs with one figure of a rope changed.

    Figures that mean nothing at these lengths, or fix the weights' shapes, are left out.
    """
    ropes = config.rope_parameters
    for layers in [""] if "rope_type" in ropes else ropes:
        for key, value in (ropes[layers] if layers else ropes).items():
            kind = (ropes[layers] if layers else ropes)["rope_type"]
            if (
                key == "rope_type"
                or (key, kind) in WITHOUT_EFFECT
                or (kind, value) == ("default", 1.0)
            ):
                continue
            altered = copy.deepcopy(config)
            figures = altered.rope_parameters[layers] if layers else altered.rope_parameters
            figures[key] = changed(value)
            if hasattr(altered, key):  # Phi-3 has it beside its rope as well, and believes that
                setattr(altered, key, figures[key])
            yield f"{layers} {key}", altered
