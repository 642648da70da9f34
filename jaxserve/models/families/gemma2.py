"""Gemma 2: layers with and without a window in turn, soft caps, norms before and after attention
and MLP.
"""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.hf_config import FULL, SLIDING, ConfigReader
from jaxserve.models.families.hf_names import tensors
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.spec import ModelSpec

NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "attn_out_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_out_norm",
}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    layers = read.integer("num_hidden_layers")
    spec = ModelSpec(
        family="gemma2",
        rope=read.rope(default_theta=10000.0),
        windows=read.windows(
            read.window(default=4096), [FULL if i % 2 else SLIDING for i in range(layers)]
        ),
        attn_softcap=softcap(read, "attn_logit_softcapping", 50.0),
        final_softcap=softcap(read, "final_logit_softcapping", 30.0),
        max_positions=read.integer("max_position_embeddings"),
        **shared_fields(read),
    )
    read.finish()
    return spec


def shared_fields(read: ConfigReader) -> dict[str, Any]:
    """What Gemma 2 and Gemma 3 read alike. Their defaults are those of transformers."""
    bias = read.take("attention_bias", False, kind=bool)
    read.expect("hidden_activation", "gelu_pytorch_tanh", None)
    read.expect("use_bidirectional_attention", False, None)
    read.ignore(
        "hidden_act", "cache_implementation", "sliding_window_size"
    )  # said better elsewhere
    d_model = read.integer("hidden_size", 2304)
    return dict(
        vocab_size=read.integer("vocab_size"),
        d_model=d_model,
        num_layers=read.integer("num_hidden_layers"),
        num_heads=read.integer("num_attention_heads", 8),
        num_kv_heads=read.integer("num_key_value_heads", 4),
        head_dim=read.integer("head_dim", 256),
        d_mlp=read.integer("intermediate_size"),
        norm_eps=float(read.take("rms_norm_eps", 1e-6)),
        tied_head=read.take("tie_word_embeddings", True, kind=bool),
        qkv_bias=bias,
        out_bias=bias,
        norms="around",
        norm_plus_one=True,
        activation="gelu_tanh",
        embed_scale=d_model**0.5,
        attn_scale=read.positive("query_pre_attn_scalar", 256) ** -0.5,
    )


def softcap(read: ConfigReader, name: str, default: float | None) -> float | None:
    """null says that there is none."""
    value = read.nullable(name, default)
    return None if value is None else float(value)


def gemma_tensors(spec: ModelSpec) -> list[Tensor]:
    return tensors(spec, NORMS)


FAMILY = Family(spec_from_hf, gemma_tensors)
