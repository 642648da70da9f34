"""Qwen2 and Qwen2.5, dense: Llama's names, biases on q, k and v, and a window over the upper layers
if it is in use.
"""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.hf_config import FULL, SLIDING, ConfigReader
from jaxserve.models.families.hf_names import tensors
from jaxserve.models.families.weight_table import Family
from jaxserve.models.spec import ModelSpec


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    heads, d_model = read.integer("num_attention_heads"), read.integer("hidden_size")
    layers = read.integer("num_hidden_layers")
    read.expect("hidden_act", "silu")
    read.expect("use_mrope", False)
    spec = ModelSpec(
        family="qwen2",
        vocab_size=read.integer("vocab_size"),
        d_model=d_model,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.kv_heads(heads),
        head_dim=read.integer("head_dim", d_model // heads),
        d_mlp=read.integer("intermediate_size"),
        norm_eps=float(read.take("rms_norm_eps", 1e-6)),
        max_positions=read.integer("max_position_embeddings"),
        rope=read.rope(default_theta=10000.0),
        windows=upper_windows(read, layers),
        tied_head=read.take("tie_word_embeddings", False, kind=bool),
        qkv_bias=True,
    )
    read.finish()
    return spec


def upper_windows(read: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """Without use_sliding_window the other two fields mean nothing (and published configs have
    them).
    """
    in_use = read.take("use_sliding_window", False, kind=bool)
    read.ignore("sliding_window", "max_window_layers")
    window = read.window(default=4096) if in_use else None
    first = read.take("max_window_layers", 28, kind=int) if window else layers
    return read.windows(window, [SLIDING if layer >= first else FULL for layer in range(layers)])


FAMILY = Family(spec_from_hf, tensors)
