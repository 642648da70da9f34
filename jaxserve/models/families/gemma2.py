"""Gemma 2: every other layer with a window, soft caps, norms before and after attention and MLP."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.hf_config import FULL, SLIDING, ConfigReader
from jaxserve.models.families.hf_names import tensors
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.rope import Rope
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
    kinds = [FULL if layer % 2 else SLIDING for layer in range(layers)]
    spec = ModelSpec(
        family="gemma2",
        layers=read.layers(read.window(default=4096), kinds),
        attn_softcap=softcap(read, "attn_logit_softcapping", 50.0),
        final_softcap=softcap(read, "final_logit_softcapping", 30.0),
        **gemma_fields(read, read.rope(default_theta=10000.0)),
    )
    read.finish()
    return spec


def gemma_fields(read: ConfigReader, rope: Rope) -> dict[str, Any]:
    """Read the fields that Gemma 2 and Gemma 3 share."""
    read.expect("hidden_activation", "gelu_pytorch_tanh", None)
    read.expect("use_bidirectional_attention", False, None)
    # Old names of hidden_activation and sliding_window, and a hint for transformers.
    read.ignore("hidden_act", "sliding_window_size", "cache_implementation")
    bias = read.take("attention_bias", False, kind=bool)
    fields = read.llama_like(
        hidden_size=2304, num_attention_heads=8, head_dim=256, tie_word_embeddings=True, rope=rope
    )
    return fields | dict(
        # Here null means the default, too, and not as many as query heads.
        num_kv_heads=read.integer("num_key_value_heads", 4),
        qkv_bias=bias,
        out_bias=bias,
        norms="around",
        norm_plus_one=True,
        activation="gelu_tanh",
        embed_scale=fields["d_model"] ** 0.5,
        attn_scale=read.positive("query_pre_attn_scalar", 256) ** -0.5,
    )


def softcap(read: ConfigReader, name: str, default: float | None) -> float | None:
    """Return a soft cap; None where the field is null."""
    return None if read.nullable(name, default) is None else read.positive(name, default)


def gemma_tensors(spec: ModelSpec) -> list[Tensor]:
    return tensors(spec, NORMS)


FAMILY = Family(spec_from_hf, gemma_tensors)
