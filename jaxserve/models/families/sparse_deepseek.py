"""DeepSeek-V3.2 and GLM-5 in contexts where their sparse attention is dense.

Every query attends to the index_topk tokens that an indexer chooses (DeepSeek sparse attention,
DeepSeek-AI 2025). A context of no more tokens than that has all of them chosen: the model is
DeepSeek-V3 there, and the indexer's weights are not read.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models.families import deepseek
from jaxserve.models.families.glm4_moe_lite import listed_expert_layers
from jaxserve.models.families.hf_config import ConfigReader
from jaxserve.models.families.typed_fields import shown
from jaxserve.models.families.weight_table import Family
from jaxserve.models.layer_kind import Latent
from jaxserve.models.spec import ModelSpec

# Defaults of GLM-5 for absent sizes of latent attention.
GLM_SIZES = Latent(query_rank=2048, rank=512, head=192, rotated=64, value=256)
INDEXED = "indexed_attention"


def spec_from_v32(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    routing = deepseek.corrected_routing(read, scale=2.5, groups=8, groups_taken=4)
    return _dense_spec(read, "deepseek_v32", routing)


def spec_from_glm5(config: Mapping[str, Any]) -> ModelSpec:
    read = ConfigReader(config)
    routing = deepseek.corrected_routing(read, scale=2.5, groups=1, groups_taken=1)
    return _dense_spec(read, "glm_moe_dsa", routing, rms_norm_eps=1e-5, sizes=GLM_SIZES)


def _dense_spec(
    read: ConfigReader, family: str, routing: dict[str, Any], **defaults: Any
) -> ModelSpec:
    """Read the fields that both families share, and end the context at index_topk."""
    read.expect("rope_interleave", True)
    read.expect("mlp_bias", False)
    read.expect("moe_router_dtype", "float32")
    # Fields of the indexer, and of what layers share of it.
    read.ignore("index_head_dim", "index_n_heads", "indexer_rope_interleave")
    read.ignore("index_topk_freq", "index_skip_topk_offset", "index_share_for_mtp_iteration")
    layers = read.integer("num_hidden_layers")
    _check_sharing(read)
    kinds = read.take("layer_types", [INDEXED] * layers, kind=list)
    if kinds != [INDEXED] * layers:
        raise ModelError(
            f"config.json: layer_types is {shown(kinds)}; implemented is {INDEXED} alone"
        )
    chosen = read.integer("index_topk", 2048)
    expert_layers = listed_expert_layers(read, first_dense=3)
    spec = deepseek.latent_spec(read, family, expert_layers, routing, **defaults)
    if chosen >= spec.max_positions:
        return spec
    longest = read.integer("max_position_embeddings")
    note = (
        f"beyond index_topk ({chosen}) attention is to the tokens that an indexer chooses, which "
        f"is not implemented (max_position_embeddings is {longest})"
    )
    return replace(spec, max_positions=chosen, context_note=note)


def _check_sharing(read: ConfigReader) -> None:
    """Raise ModelError unless every layer has the tokens of its own or of another's indexer."""
    types = read.take("indexer_types", [], kind=list)
    pattern = read.take("index_topk_pattern", "", kind=(str, list))
    for name, found, known in (
        ("indexer_types", types, ("full", "shared")),
        ("index_topk_pattern", pattern, ("F", "S", "full", "shared")),
    ):
        if any(kind not in known for kind in found):
            raise ModelError(
                f"config.json: {name} is {shown(found)}; implemented are {', '.join(known)}"
            )


def ignored(spec: ModelSpec) -> tuple[str, ...]:
    """Return patterns of the indexers' tensors, and of the layers that propose tokens."""
    return (*deepseek.ignored(spec), "model.layers.*.self_attn.indexer.*")


V32 = Family(spec_from_v32, deepseek.tensors, ignored)
GLM5 = Family(spec_from_glm5, deepseek.tensors, ignored)
