"""Support for sentence-transformers' modules, and the errors for other modules."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.checkpoints.hf import HFCheckpoint, Module
from jaxserve.errors import ModelError
from jaxserve.models.families.pooling import embeds
from tests.embedding_model import FOLDER

PUBLISHED: dict[str, Any] = json.loads((FOLDER / "1_Pooling" / "config.json").read_text())
RESAVED = {
    "embedding_dimension": 32,
    "pooling_mode": "lasttoken",
    "include_prompt": True,
}  # by version 6
TRANSFORMER = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}


def modules(*, first: Any = None, pooling: Any = None, last: Any = None) -> tuple[Module, ...]:
    return (
        Module("Transformer", "sentence_bert_config.json", first or {}),
        Module("Pooling", "1_Pooling/config.json", PUBLISHED if pooling is None else pooling),
        Module("Normalize", "2_Normalize/config.json", last or {}),
    )


def test_the_published_folder() -> None:
    assert embeds(HFCheckpoint.open(FOLDER).modules)
    assert not embeds(())


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"first": {"max_seq_length": 32768, "do_lower_case": False}},
        {
            "first": TRANSFORMER,
            "pooling": RESAVED,
            "last": {"module_input_name": "sentence_embedding"},
        },
        {"pooling": RESAVED | {"pooling_mode": ["lasttoken"]}},
    ],
)
def test_what_is_understood(given: dict[str, Any]) -> None:
    assert embeds(modules(**given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"pooling": PUBLISHED | {"pooling_mode_mean_tokens": True}},
            "pooling_mode_mean_tokens = True",
        ),
        (
            {"pooling": PUBLISHED | {"pooling_mode_lasttoken": False}},
            "pooling_mode_lasttoken = False",
        ),
        ({"pooling": RESAVED | {"pooling_mode": "cls"}}, "pooling_mode = 'cls'"),
        ({"pooling": RESAVED | {"pooling_mode": ["lasttoken", "mean"]}}, "pooling_mode = "),
        ({"pooling": PUBLISHED | {"pooling_mode_other": False}}, "pooling_mode_other = False"),
        ({"pooling": {"embedding_dimension": 32}}, "does not say that the last token is taken"),
        ({"pooling": {}}, "does not say that the last token is taken"),
        ({"first": {"do_lower_case": True}}, "sentence_bert_config.json: do_lower_case = True"),
        (
            {"last": {"module_input_name": "token_embeddings"}},
            "module_input_name = 'token_embeddings'",
        ),
    ],
)
def test_what_is_not(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        embeds(modules(**given))
    assert "implemented: Transformer, the Pooling of the last token, Normalize" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "kinds", [("Transformer",), ("Transformer", "Pooling"), ("Transformer", "Pooling", "Dense")]
)
def test_other_modules(kinds: tuple[str, ...]) -> None:
    with pytest.raises(ModelError, match=f"modules.json: {', '.join(kinds)} is not implemented"):
        embeds([Module(kind, "", {}) for kind in kinds])


def test_the_folder_of_another_model(tmp_path: Path) -> None:
    """A folder is refused as it is read from disk."""
    entries = json.loads((FOLDER / "modules.json").read_text())
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    (tmp_path / "modules.json").write_text(json.dumps(entries[:2]))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(PUBLISHED))
    with pytest.raises(ModelError, match=r"modules\.json: Transformer, Pooling is not implemented"):
        embeds(HFCheckpoint.open(tmp_path).modules)
