"""OLMo 2: norms after attention and MLP instead of before, and norms over all query and all key
heads together.
"""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families import hf_names as names
from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.spec import ModelSpec

NORMS = {"post_attention_layernorm": "attn_out_norm", "post_feedforward_layernorm": "mlp_out_norm"}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    heads, d_model = read.integer("num_attention_heads"), read.integer("hidden_size")
    read.expect("hidden_act", "silu")
    read.expect("attention_bias", False)
    spec = ModelSpec(
        family="olmo2",
        vocab_size=read.integer("vocab_size"),
        d_model=d_model,
        num_layers=read.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=read.kv_heads(heads),
        head_dim=read.integer("head_dim", d_model // heads),
        d_mlp=read.integer("intermediate_size"),
        norm_eps=float(read.take("rms_norm_eps", 1e-5)),
        max_positions=read.integer("max_position_embeddings"),
        rope=read.rope(default_theta=10000.0),
        tied_head=read.take("tie_word_embeddings", False, kind=bool),
        norms="after",
        norm_rounds_last=True,
        qk_norm="whole",
    )
    read.finish()
    return spec


def tensors(spec: ModelSpec) -> list[Tensor]:
    return names.tensors(spec, NORMS)


FAMILY = Family(spec_from_hf, tensors)
