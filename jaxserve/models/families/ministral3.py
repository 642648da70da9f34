"""Ministral 3 and Devstral 2: Mistral with YaRN, and queries that grow with their position."""

import math
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.hf_names import tensors
from jaxserve.models.families.hf_rope import ORIGINAL
from jaxserve.models.families.typed_fields import Fields
from jaxserve.models.families.weight_table import Family
from jaxserve.models.layer_kind import windowed
from jaxserve.models.rope import QueryGrowth
from jaxserve.models.spec import ModelSpec

BETA = "llama_4_scaling_beta"


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("hidden_act", "silu")
    layers = read.integer("num_hidden_layers")
    spec = ModelSpec(
        family="ministral3",
        layers=windowed([read.window()] * layers),
        query_growth=_query_growth(Fields(read.object("rope_parameters"))),
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


def _query_growth(rope: Fields) -> QueryGrowth | None:
    """Read how queries grow; those of Devstral 2 123B do not."""
    beta = rope.number(BETA)
    if not 0 <= beta < math.inf:
        raise ModelError(f"config.json: {BETA} is {beta:g}; it must be 0 or a positive number")
    return QueryGrowth(beta, rope.integer(ORIGINAL)) if beta else None


FAMILY = Family(spec_from_hf, tensors)
