"""GLM-4.7-Flash: the latent attention and the experts of DeepSeek-V3."""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models.families import deepseek
from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.weight_table import Family
from jaxserve.models.layer_kind import Latent
from jaxserve.models.spec import ModelSpec

# Defaults for absent sizes of latent attention.
SIZES = Latent(query_rank=768, rank=512, head=192, rotated=64, value=256)
DENSE = "dense"
SPARSE = "sparse"


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    read.expect("partial_rotary_factor", 1.0)
    routing = deepseek.corrected_routing(read, scale=1.8, groups=1, groups_taken=1)
    layers = listed_expert_layers(read, first_dense=1)
    return deepseek.latent_spec(
        read, "glm4_moe_lite", layers, routing, rms_norm_eps=1e-5, sizes=SIZES
    )


def listed_expert_layers(read: ConfigReader, first_dense: int) -> tuple[int, ...]:
    """Return the layers with experts, which newer files list and older ones count.

    Args:
        first_dense: Number of dense layers, where config.json does not say it.
    """
    count = read.integer("num_hidden_layers")
    dense = read.count("first_k_dense_replace", first_dense)
    counted = [DENSE if layer < dense else SPARSE for layer in range(count)]
    kinds = read.take("mlp_layer_types", counted, kind=list)
    if len(kinds) != count or any(kind not in (DENSE, SPARSE) for kind in kinds):
        raise ModelError(
            f"config.json: mlp_layer_types has {len(kinds)} entries; it must have {DENSE} or "
            f"{SPARSE} for each of {count} layers"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == SPARSE)


FAMILY = Family(spec_from_hf, deepseek.tensors, deepseek.ignored)
