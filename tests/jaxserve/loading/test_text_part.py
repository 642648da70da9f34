"""The text part of a checkpoint that also has a vision tower."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.errors import ModelError
from jaxserve.loading.convert import to_hf, to_orbax
from jaxserve.loading.folder import open_model
from jaxserve.loading.spec import read_spec
from jaxserve.loading.tensor_names import NAMINGS, naming_of
from tests.jaxserve.loading.loaded import load_params
from tests.jaxserve.loading.test_folder import folder_with
from tests.jaxserve.models.decoder_harness import one_device_mesh

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = {  # a checkpoint with a tower, and the one of its text model
    "gemma3_images": "gemma3_two_ropes",
    "gemma3_images_newer": "gemma3_wide_window",
    "mistral3_images": "mistral_window",
    "mistral3_images_newer": "mistral_no_window",
    "qwen2_5_vl": "qwen2_tied",
    "qwen2_5_vl_newer": "qwen2_window",
    "qwen3_vl": "qwen3_gqa",
    "qwen3_vl_moe": "qwen3_moe_gqa",  # experts as published
    "qwen3_vl_moe_newer": "qwen3_moe_mlp_only_layers",
    "glm4v": "glm4_legacy",
    "glm4v_moe": "glm4_moe_groups",
    "kimi_k25": "deepseek_v3_plain_rope",
    "exaone4_5": "exaone4_legacy",
    "qwen3_5_images": "qwen3_5",
    "qwen3_5_tied_images": "qwen3_5_tied",
    "qwen3_5_moe_images": "qwen3_5_moe",
    "qwen3_5_moe_images_stacked": "qwen3_5_moe",
}
BOTH = ("gemma3_images", "mistral3_images_newer")  # prefixes of both kinds


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_the_text_model(case: str) -> None:
    whole, text = (
        load_params(HFCheckpoint.open(GOLDEN / name), one_device_mesh())
        for name in (case, CASES[case])
    )
    for one, two in zip(jax.tree.leaves(whole), jax.tree.leaves(text), strict=True):
        np.testing.assert_array_equal(one, two)


def copied(case: str, folder: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / case / name, folder / name)
    return folder


def with_tensors(case: str, folder: Path, **changes: np.ndarray | None) -> HFCheckpoint:
    """Return a checkpoint with other tensors; None takes one out. Names have __ for dots."""
    copied(case, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return HFCheckpoint.open(folder)


EXTRA = np.zeros((2, 2), np.float32)


def test_other_tensors_are_accounted_for(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"1 tensors that config.json .*: audio_tower.weight"):
        load_params(
            with_tensors("gemma3_images", tmp_path, audio_tower__weight=EXTRA), one_device_mesh()
        )


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    checkpoint = with_tensors("gemma3_images", tmp_path, language_model__model__norm__weight=None)
    with pytest.raises(ModelError, match=r"lacks 1 tensors: language_model\.model\.norm\.weight"):
        load_params(checkpoint, one_device_mesh())


def test_a_tensor_below_two_prefixes_is_refused(tmp_path: Path) -> None:
    checkpoint = with_tensors("gemma3_images", tmp_path, model__norm__weight=EXTRA)
    with pytest.raises(ModelError, match=r"below two prefixes: language_model.model.norm.weight"):
        load_params(checkpoint, one_device_mesh())


@pytest.mark.parametrize("case", BOTH)
def test_a_line_says_what_is_left_out(case: str, tmp_path: Path) -> None:
    folder_with(tmp_path, 96)  # a tokenizer
    files = open_model(copied(case, tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    towers = [x for name, x in tensors.items() if "vision_tower" in name or "projector" in name]
    (note,) = files.notes
    found = re.search(r"text part is loaded: (\d+) tensors of vision_tower .* \((.*) MiB\)", note)
    assert found, note
    assert int(found[1]) == len(towers)
    assert float(found[2]) == pytest.approx(sum(x.nbytes for x in towers) / 2**20, abs=0.05)


def test_end_tokens_are_those_of_the_text_part(tmp_path: Path) -> None:
    folder_with(tmp_path, 96)
    copied("gemma3_images", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("eos_token_id", None)
    config["text_config"]["eos_token_id"] = [7, 8]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_model(tmp_path).tokens.eos_ids[:2] == (7, 8)


def test_a_converted_folder_has_the_text_part_alone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    folder_with(source, 96)
    copied("gemma3_images", source)
    note = to_orbax(source, tmp_path / "orbax", lambda done, total, what: None)
    assert note
    assert note.startswith("the text part is loaded: ")
    files = open_model(tmp_path / "orbax")
    assert files.notes == ()
    with pytest.raises(ModelError, match="the text part of a model with vision_tower and"):
        to_hf(tmp_path / "orbax", tmp_path / "again", lambda done, total, what: None)


def config_of(case: str) -> dict[str, Any]:
    return json.loads((GOLDEN / case / "config.json").read_text())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "model_type of text_config is None (implemented: gemma3_text)"),
        ({"text_config": [1]}, "text_config is [1]; it must be an object or null"),
        ({"audio_config": {}}, "fields that this family does not understand: audio_config"),
        (
            {"text_config": {"model_type": "gemma3_text", "sliding_windows": 3}},
            "text_config of config.json has fields that this family does not understand: sliding",
        ),
        (
            {"text_config": {"model_type": "gemma3_text", "hidden_size": "x"}},
            "text_config of config.json: hidden_size is 'x', not of the type",
        ),
    ],
)
def test_a_spoilt_config_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        read_spec(config_of("gemma3_images") | change)


def test_the_head_is_tied_where_the_whole_model_says_so() -> None:
    config = config_of("mistral3_images")
    assert not read_spec(config)[1].tied_head
    assert read_spec(config | {"tie_word_embeddings": True})[1].tied_head


def test_fields_of_the_text_part_may_be_in_both_places() -> None:
    config = config_of("qwen2_5_vl_newer")
    twice = {name: config["text_config"][name] for name in ("vocab_size", "hidden_size")}
    assert read_spec(config | twice)[1] == read_spec(config)[1]
    with pytest.raises(ModelError, match="does not understand: vocab_size"):
        read_spec(config | {"vocab_size": 95})


def test_a_head_that_is_tied_inside_counts_in_older_files() -> None:
    config = config_of("qwen2_5_vl_newer") | {"tie_word_embeddings": False}
    text = config["text_config"] | {"tie_word_embeddings": True}
    assert not read_spec(config)[1].tied_head
    assert read_spec(config | {"text_config": text})[1].tied_head


@pytest.mark.parametrize("naming", NAMINGS)
def test_names_go_both_ways(naming: Any) -> None:
    plain = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    stored = [naming.from_plain(name) for name in plain]
    assert naming_of(stored) == naming
    assert [naming.to_plain(name) for name in stored] == plain
