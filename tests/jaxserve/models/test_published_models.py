"""Published config.json files with their sources, and the table that docs have of them."""

from pathlib import Path
from typing import Any

import pytest

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
# report without the layer that proposes tokens (3.97), and with both embeddings (1.55).
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
}


@pytest.mark.parametrize("model", SIZES)
def test_parameters_are_as_many_as_published(model: str) -> None:
    found = next(each for each in published() if each.model == model)
    billions = float(outcome(found.config).split()[0].replace(",", ""))
    assert billions == pytest.approx(SIZES[model], rel=0.005)


@pytest.mark.parametrize("each", published(), ids=lambda each: each.model)
def test_a_refusal_is_one_line(each: Published) -> None:
    assert "\n" not in outcome(each.config)


def test_the_rest_of_a_config_is_read_where_its_quantization_is_refused() -> None:
    """Devstral 2 is published in FP8 with static activations, and its queries do not grow."""
    found = next(each for each in published() if each.model == DEVSTRAL)
    assert "activation_scheme 'static' is not implemented" in outcome(found.config)
    config = {name: value for name, value in found.config.items() if "quantization" not in name}
    assert outcome(config) == "125.03 B parameters"


GROWING = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
SPOILT = [
    ("MiniMaxAI/MiniMax-M2.7", {"partial_rotary_factor": 0.25}, "they have to be the same"),
    ("MiniMaxAI/MiniMax-M2.7", {"attn_type_list": [1, 0]}, "implemented is 1 for all 62 layers"),
    ("MiniMaxAI/MiniMax-M2.7", {"shared_intermediate_size": 8}, "= 8 is not implemented"),
    ("zai-org/GLM-4.5", {"first_k_dense_replace": -(10**12)}, "it must be 0 to"),
    ("zai-org/GLM-4.5", {"routed_scaling_factor": 10**400}, "is beyond the range of float64"),
    ("zai-org/GLM-4.5", {"partial_rotary_factor": 10**400}, "is beyond the range of float64"),
    (DEVSTRAL, {"rope_parameters": GROWING}, "llama_4_scaling_beta of rope_parameters must be a"),
    (
        DEVSTRAL,
        {"rope_parameters": GROWING | {"llama_4_scaling_beta": float("inf")}},
        "llama_4_scaling_beta of rope_parameters must be a number from 0 to",
    ),
    (
        DEVSTRAL,
        {
            "rope_parameters": GROWING
            | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 0}
        },
        "queries that grow by 0.1 every 0 positions; both numbers must be positive",
    ),
]


@pytest.mark.parametrize(("model", "fields", "message"), SPOILT)
def test_a_spoilt_field_is_refused(model: str, fields: dict[str, Any], message: str) -> None:
    config = next(each.config for each in published() if each.model == model)
    config.pop("quantization_config", None)
    assert outcome(config).endswith("B parameters")
    assert message in outcome(config | fields)
