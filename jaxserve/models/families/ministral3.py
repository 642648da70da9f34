"""Ministral 3 and Devstral 2: Mistral with YaRN, and queries that grow with their position."""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models.families.hf_config import MAX_SIZE, ConfigReader
from jaxserve.models.families.hf_names import tensors
from jaxserve.models.families.weight_table import Family
from jaxserve.models.layer_kind import windowed
from jaxserve.models.rope import QueryGrowth
from jaxserve.models.spec import ModelSpec

BETA = "llama_4_scaling_beta"
LENGTH = "original_max_position_embeddings"


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("hidden_act", "silu")
    layers = read.integer("num_hidden_layers")
    spec = ModelSpec(
        family="ministral3",
        layers=windowed([read.window()] * layers),
        query_growth=_query_growth(read.object("rope_parameters")),
        # Published files repeat the context among the fields of the rope.
        **read.llama_like(
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-5,
            rope=read.rope(1e6, apart=(BETA, "max_position_embeddings")),
        ),
    )
    read.finish()
    return spec


def _query_growth(rope: Mapping[str, Any]) -> QueryGrowth | None:
    """Read how queries grow; those of Devstral 2 123B do not."""
    beta = _number(rope, BETA)
    return QueryGrowth(beta, int(_number(rope, LENGTH))) if beta else None


def _number(rope: Mapping[str, Any], name: str) -> float:
    """Return a number among the fields of the rope."""
    value = rope.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"config.json: {name} of rope_parameters must be a number")
    if not 0 <= value <= MAX_SIZE:
        raise ModelError(
            f"config.json: {name} of rope_parameters must be a number from 0 to {MAX_SIZE}"
        )
    return value


FAMILY = Family(spec_from_hf, tensors)
