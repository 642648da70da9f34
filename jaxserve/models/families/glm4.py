"""GLM-4 and GLM-4-0414: half of a head rotated in neighbouring pairs, and fused gate_up tensors."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.models.families import hf_names
from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.weight_table import Family, Tensor
from jaxserve.models.spec import ModelSpec

NORMS_AROUND = {
    "input_layernorm": "attn_norm",
    "post_self_attn_layernorm": "attn_out_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_mlp_layernorm": "mlp_out_norm",
}


def spec_from_hf(family: str, norms: str, config: Mapping[str, Any]) -> ModelSpec:
    """Read config.json; `norms` are those of the family, as of ModelSpec."""
    read = ConfigReader(config)
    read.expect("hidden_act", "silu")
    rotated = read.positive("partial_rotary_factor", 0.5)
    spec = ModelSpec(
        family=family,
        norms=norms,
        qkv_bias=read.take("attention_bias", True, kind=bool),
        **read.llama_like(
            num_key_value_heads=2,
            head_dim=128,
            rms_norm_eps=1.5625e-7,
            rope=read.rope(10000.0, beside={"partial_rotary_factor": rotated}),
        ),
    )
    read.finish()
    return spec


def tensors(norms: Mapping[str, str], spec: ModelSpec) -> list[Tensor]:
    """Return the weight table; `norms` are parameters by their names in the checkpoint."""
    rows = hf_names.neighbours(spec, hf_names.tensors(spec, norms))
    return [_fused(row) for row in rows]


def _fused(row: Tensor) -> Tensor:
    """Return the row of a gate or an up as its part of the tensor that holds both."""
    own = str(row.path[-1])
    if own not in ("gate", "up"):
        return row
    name = row.name.replace(f"{own}_proj", "gate_up_proj")
    return Tensor(name, row.path, "([F|F])D", part=("gate", "up").index(own))


GLM = Family(partial(spec_from_hf, "glm", "before"), partial(tensors, hf_names.PRE_NORMS))
GLM4 = Family(partial(spec_from_hf, "glm4", "around"), partial(tensors, NORMS_AROUND))
