"""OLMo 2: norms after attention and MLP instead of before, and norms over all heads together."""

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families import hf_names
from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.spec import ModelSpec

NORMS = {"post_attention_layernorm": "attn_out_norm", "post_feedforward_layernorm": "mlp_out_norm"}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("hidden_act", "silu")
    bias = read.take("attention_bias", False, kind=bool)
    spec = ModelSpec(
        family="olmo2",
        norms="after",
        norm_rounds_last=True,
        qk_norm="whole",
        qkv_bias=bias,
        out_bias=bias,
        **read.llama_like(rms_norm_eps=1e-5),
    )
    read.finish()
    return spec


def tensors(spec: ModelSpec) -> list[Tensor]:
    return hf_names.tensors(spec, NORMS)


FAMILY = Family(spec_from_hf, tensors)
