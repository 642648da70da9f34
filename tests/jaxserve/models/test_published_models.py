"""Published config.json files with their sources, and the table that docs have of them."""

from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineOptions
from jaxserve.config.resolution import resolve
from jaxserve.errors import ConfigError
from jaxserve.loading.spec import read_spec
from tests.published_models import Published, document, outcome, published

DEVSTRAL = "mistralai/Devstral-2-123B-Instruct-2512"
DOCUMENT = Path(__file__).parents[3] / "docs" / "published-models.md"


def test_files_are_those_of_their_sources() -> None:
    assert [each.model for each in published() if not each.is_unchanged] == []
    assert len({each.file for each in published()}) == len(published())


def test_the_table_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == "\n".join(document()) + "\n", "python -m tests.published_models"


# Numbers of parameters that publishers give for the text model, in billions. Those of Gemma 3 are
# sums of table 1 of its report, without the vision encoder; that of GLM-4.5 is the 355 of its
# report without the layer that proposes tokens (3.97), and with both embeddings (1.55). Those below
# Qwen3-Coder are the totals that the hub shows beside the models' weights.
SIZES = {
    "deepseek-ai/DeepSeek-V3": 671,
    "google/gemma-3-27b-it": 27.016,
    "google/gemma-3-4b-it": 3.884,
    "zai-org/GLM-4.5": 352.6,
    "MiniMaxAI/MiniMax-M2.7": 229,
    "moonshotai/Kimi-K2-Instruct": 1026,
    "openai/gpt-oss-120b": 116.8,
    "openai/gpt-oss-20b": 20.9,
    "Qwen/Qwen3-235B-A22B": 235,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480,
    "Qwen/Qwen2.5-VL-7B-Instruct": 7.62,  # as Qwen2.5-7B
    "Qwen/Qwen3-VL-235B-A22B-Instruct": 235,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": 30.5,
    "HuggingFaceTB/SmolLM3-3B": 3.08,
    "allenai/Olmo-3-1025-7B": 7.30,
    "allenai/Olmo-3.1-32B-Instruct": 32.2,
    "ibm-granite/granite-3.0-2b-base": 2.53,
    "ibm-granite/granite-3.3-8b-instruct": 8.17,
    "ibm-granite/granite-3.0-1b-a400m-base": 1.33,
    "ibm-granite/granite-3.0-3b-a800m-base": 3.30,
    "baidu/ERNIE-4.5-0.3B-Base-PT": 0.36,
    "LGAI-EXAONE/EXAONE-4.0-1.2B": 1.28,
    "LGAI-EXAONE/EXAONE-4.0-32B": 32.0,
    "tencent/Hunyuan-A13B-Instruct": 80.4,
    "tencent/Hunyuan-7B-Instruct": 7.50,
    "THUDM/glm-4-9b-chat-hf": 9.40,
    "zai-org/GLM-4-9B-0414": 9.40,
    "zai-org/GLM-4-32B-0414": 32.6,
    "google/gemma-7b": 8.54,
}


@pytest.mark.parametrize("model", SIZES)
def test_parameters_are_as_many_as_published(model: str) -> None:
    found = next(each for each in published() if each.model == model)
    billions = float(outcome(found.config).split()[0].replace(",", ""))
    assert billions == pytest.approx(SIZES[model], rel=0.005)


@pytest.mark.parametrize("each", published(), ids=lambda each: each.model)
def test_a_refusal_is_one_line(each: Published) -> None:
    assert "\n" not in outcome(each.config)


def test_devstral_2_has_queries_that_do_not_grow() -> None:
    """It is published in FP8 with static scales of activations."""
    found = next(each for each in published() if each.model == DEVSTRAL)
    assert outcome(found.config) == "125.03 B parameters"
    assert read_spec(found.config)[1].query_growth is None


def config_of(model: str) -> dict[str, Any]:
    return next(each.config for each in published() if each.model == model)


def test_yarn_raises_the_context() -> None:
    """The fields are those of the card of Qwen3-8B."""
    config = config_of("Qwen/Qwen3-8B")
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert read_spec(config)[1].max_positions == 40960
    assert read_spec(config | {"rope_scaling": yarn})[1].max_positions == 131072


@pytest.mark.parametrize("model", ["deepseek-ai/DeepSeek-V3.2", "zai-org/GLM-5", "zai-org/GLM-5.2"])
def test_the_context_of_sparse_attention_ends_where_it_is_dense(model: str) -> None:
    config = config_of(model)
    config.pop("quantization_config", None)
    spec = read_spec(config)[1]
    longest = config["max_position_embeddings"]
    assert spec.max_positions == 2048
    with pytest.raises(ConfigError, match=rf"at most 2048 tokens: .* is {longest}\)"):
        resolve(
            EngineOptions(max_context=2049),
            max_positions=spec.max_positions,
            lanes=1,
            affordable_tokens=10**6,
            context_note=spec.context_note,
        )
    assert read_spec(config | {"index_topk": longest})[1].context_note == ""


def test_a_longer_context_than_the_models_names_the_field() -> None:
    with pytest.raises(ConfigError, match="at most 40960 tokens: max_position_embeddings of its"):
        resolve(
            EngineOptions(max_context=40961), max_positions=40960, lanes=1, affordable_tokens=10**6
        )


CHUNKS = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"])
def test_dual_chunks_are_refused_with_a_way_out(model: str) -> None:
    found = outcome(config_of(model) | {"dual_chunk_attention_config": CHUNKS})
    assert "in contexts of at most 253952 tokens" in found


def test_layers_may_all_be_dense() -> None:
    config = config_of("zai-org/GLM-4.5")
    dense = read_spec(config | {"first_k_dense_replace": config["num_hidden_layers"]})[1]
    assert dense.mixture is None


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GROWING = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
SPOILT = [
    ("tencent/Hunyuan-A13B-Instruct", {"moe_topk": [8] * 31 + [7]}, "one number for all 32 layers"),
    ("tencent/Hunyuan-A13B-Instruct", {"moe_topk": []}, "one number for all 32 layers"),
    ("tencent/Hunyuan-A13B-Instruct", {"use_cla": True}, "use_cla = True is not implemented"),
    ("tencent/Hunyuan-A13B-Instruct", {"attention_head_dim": 64}, "have to be the same"),
    (
        "tencent/Hunyuan-A13B-Instruct",
        {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 2.0}},
        "factor = 2.0 is not implemented",
    ),
    ("HuggingFaceTB/SmolLM3-3B", {"no_rope_layers": [1] * 35}, "a 0 or 1 for each of 36 layers"),
    ("HuggingFaceTB/SmolLM3-3B", {"no_rope_layers": [2] * 36}, "a 0 or 1 for each of 36 layers"),
    ("HuggingFaceTB/SmolLM3-3B", {"layer_types": ["full_attention"]}, "layer_types has 1 layers"),
    (
        "allenai/Olmo-3-1025-7B",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        "they must have full_attention and sliding_attention",
    ),
    ("ibm-granite/granite-3.3-8b-instruct", {"residual_multiplier": 0}, "must be a positive num"),
    ("ibm-granite/granite-3.3-8b-instruct", {"logits_scaling": -1.0}, "must be a positive number"),
    ("LGAI-EXAONE/EXAONE-4.0-32B", {"layer_types": None}, "sliding_window_pattern is 'LLLG'"),
    ("Qwen/Qwen3-VL-30B-A3B-Instruct", {"text_config": None}, "model_type of text_config is None"),
    ("Qwen/Qwen2.5-VL-7B-Instruct", {"use_audio": 1}, "does not understand: use_audio"),
    ("tencent/Hunyuan-A13B-Instruct", {"moe_topk": [None] * 32}, "one number for all 32 layers"),
    (
        "tencent/Hunyuan-A13B-Instruct",
        {"rope_scaling": {"type": "dynamic", "alpha": 1e300}},
        "gives frequencies that are no positive float32 numbers",
    ),
    (
        "tencent/Hunyuan-A13B-Instruct",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "alpha": 2.0}},
        "the rope of type 'yarn' does not understand: alpha",
    ),
    ("LGAI-EXAONE/EXAONE-4.0-32B", {"layer_types": []}, "layer_types has 0 layers"),
    ("zai-org/GLM-5.2", {"indexer_types": ["full", "x"]}, "implemented are full, shared"),
    ("zai-org/GLM-5.2", {"index_topk_pattern": "FSx"}, "implemented are F, S, full, shared"),
    *(
        ("Qwen/Qwen3-8B", {"rope_scaling": YARN | change}, problem)
        for change, problem in (
            ({"factor": 1e308}, "supports more than 2147483647"),
            ({"factor": 1e12}, "supports more than 2147483647"),
            ({"original_max_position_embeddings": 10**400}, "0 ...; at most 2147483647 are"),
        )
    ),
    ("LGAI-EXAONE/EXAONE-4.0-32B", {"sliding_window": None}, "no sliding_window is in use"),
    (
        "allenai/Olmo-3-1025-7B",
        {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 5e5}
                for kind in ("full_attention", "sliding_attention")
            },
            "rope_scaling": {"rope_type": "yarn", "factor": 8.0},
        },
        "rope_parameters have factor, rope_type beside those of kinds of layers",
    ),
    ("ibm-granite/granite-3.3-8b-instruct", {"logits_scaling": True}, "must be a number"),
    ("zai-org/GLM-5", {"layer_types": ["full_attention"] * 78}, "implemented is indexed_attention"),
    ("MiniMaxAI/MiniMax-M2.7", {"partial_rotary_factor": 0.25}, "they have to be the same"),
    ("MiniMaxAI/MiniMax-M2.7", {"attn_type_list": [1, 0]}, "implemented is 1 for all 62 layers"),
    ("MiniMaxAI/MiniMax-M2.7", {"shared_intermediate_size": 8}, "= 8 is not implemented"),
    ("zai-org/GLM-4.5", {"first_k_dense_replace": -(10**12)}, "it must be 0 to"),
    ("zai-org/GLM-4.5", {"routed_scaling_factor": 10**400}, "is beyond the range of float64"),
    ("zai-org/GLM-4.5", {"partial_rotary_factor": 10**400}, "is beyond the range of float64"),
    (DEVSTRAL, {"rope_parameters": GROWING}, "lacks 'llama_4_scaling_beta', which"),
    (
        DEVSTRAL,
        {"rope_parameters": GROWING | {"llama_4_scaling_beta": float("inf")}},
        "llama_4_scaling_beta is inf; it must be 0 or a positive number",
    ),
    (
        DEVSTRAL,
        {
            "rope_parameters": GROWING
            | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 0}
        },
        "original_max_position_embeddings is 0; it must be an integer of at least 1",
    ),
]


@pytest.mark.parametrize(("model", "fields", "message"), SPOILT)
def test_a_spoilt_field_is_refused(model: str, fields: dict[str, Any], message: str) -> None:
    config = next(each.config for each in published() if each.model == model)
    config.pop("quantization_config", None)
    assert "B parameters" in outcome(config)
    assert message in outcome(config | fields)
