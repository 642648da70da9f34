"""Hugging Face folders: which files are taken, and what is refused by name."""

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hf import INDEX, HFCheckpoint, note_on_weights
from jaxserve.checkpoints.safetensors_reader import check_finite

FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


def tensor(value: float) -> np.ndarray:
    return np.full((2, 3), value, ml_dtypes.bfloat16)


def folder_with(folder: Path, files: dict[str, Any], index: Any = None) -> Path:
    """Write a checkpoint folder: bytes and text as they are, dicts of arrays as safetensors."""
    for name, contents in {"config.json": '{"model_type": "llama"}', **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(contents, dict):
            save_file(contents, path)
        else:
            path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    if index is not None:
        (folder / INDEX).write_text(json.dumps(index))
    return folder


def failure(folder: Path | str) -> str:
    with pytest.raises(CheckpointError) as caught:
        HFCheckpoint.open(folder)
    message = str(caught.value)
    assert message.isprintable() and message.startswith(str(folder))
    return message


def weight_map(**placed: str) -> dict[str, Any]:
    return {"metadata": {"total_size": 24}, "weight_map": placed}


def test_single_file(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"model.safetensors": {"a": tensor(1)}})
    checkpoint = HFCheckpoint.open(str(folder))
    assert checkpoint.folder == folder
    assert checkpoint.config == {"model_type": "llama"} and checkpoint.generation_config == {}
    np.testing.assert_array_equal(checkpoint.tensors["a"], tensor(1), strict=True)
    with pytest.raises(TypeError):
        checkpoint.tensors["b"] = tensor(0)  # type: ignore[index]


def test_modules_of_sentence_transformers(tmp_path: Path) -> None:
    entries = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.modules.pooling.Pooling",
        },
        {
            "idx": 2,
            "name": "2",
            "path": "2_Normalize",
            "type": "sentence_transformers.models.Normalize",
        },
    ]
    weights = {"model.safetensors": {"a": tensor(1)}}
    assert HFCheckpoint.open(folder_with(tmp_path, weights)).modules == ()
    files = {"modules.json": json.dumps(entries), "1_Pooling/config.json": '{"x": 1}'}
    found = HFCheckpoint.open(folder_with(tmp_path, files)).modules
    assert [(m.kind, m.file, m.config) for m in found] == [
        ("Transformer", "sentence_bert_config.json", {}),
        ("Pooling", "1_Pooling/config.json", {"x": 1}),
        ("Normalize", "2_Normalize/config.json", {}),
    ]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("{", "not valid JSON"),
        ('{"type": "x"}', "is no module with a type and a path"),
        ("[3]", "3 is no module"),
        ('[{"type": "x.Pooling", "path": null}]', "is no module"),
        (
            '[{"type": "x.Pooling", "path": "../other"}]',
            "names the folder '../other' outside its own",
        ),
        ('[{"type": "x.Pooling", "path": "/etc"}]', "outside its own"),
    ],
)
def test_modules_that_are_none(tmp_path: Path, contents: str, message: str) -> None:
    files = {"model.safetensors": {"a": tensor(1)}, "modules.json": contents}
    assert message in failure(folder_with(tmp_path, files))


def test_generation_config_is_read(tmp_path: Path) -> None:
    files = {
        "model.safetensors": {"a": tensor(1)},
        "generation_config.json": '{"eos_token_id": [1, 2]}',
    }
    assert HFCheckpoint.open(folder_with(tmp_path, files)).generation_config == {
        "eos_token_id": [1, 2]
    }


def test_shards_of_an_index(tmp_path: Path) -> None:
    files = {FIRST: {"a": tensor(1), "b": tensor(2)}, SECOND: {"c": tensor(3)}}
    tensors = HFCheckpoint.open(
        folder_with(tmp_path, files, weight_map(c=SECOND, a=FIRST, b=FIRST))
    ).tensors
    assert {name: float(array[0, 0]) for name, array in tensors.items()} == {"a": 1, "b": 2, "c": 3}


def test_shards_in_a_subfolder(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path, {"shards/x.safetensors": {"a": tensor(1)}}, weight_map(a="shards/x.safetensors")
    )
    assert list(HFCheckpoint.open(folder).tensors) == ["a"]


def test_the_index_decides_between_two_shards_and_leftovers_are_kept(tmp_path: Path) -> None:
    files = {FIRST: {"a": tensor(1), "left": tensor(9)}, SECOND: {"a": tensor(2), "b": tensor(3)}}
    tensors = HFCheckpoint.open(
        folder_with(tmp_path, files, weight_map(a=SECOND, b=SECOND))
    ).tensors
    assert {name: float(array[0, 0]) for name, array in tensors.items()} == {"a": 2, "b": 3}

    tensors = HFCheckpoint.open(folder_with(tmp_path, files, weight_map(a=FIRST, b=SECOND))).tensors
    assert {name: float(array[0, 0]) for name, array in tensors.items()} == {
        "a": 1,
        "b": 3,
        "left": 9,
    }


def test_an_index_goes_before_a_single_file(tmp_path: Path) -> None:
    # Blaizzy/mlx-vlm#1329: a file of another quantization, left beside the shards.
    files = {"model.safetensors": {"a": tensor(1)}, FIRST: {"a": tensor(2)}}
    folder = folder_with(tmp_path, files, weight_map(a=FIRST))
    assert float(HFCheckpoint.open(folder).tensors["a"][0, 0]) == 2
    assert note_on_weights(folder) == f"the files of {INDEX} are read, and model.safetensors is not"


@pytest.mark.parametrize(
    "index",
    [weight_map(a="gone.safetensors"), weight_map(a=FIRST, b="gone"), {}, {"weight_map": 1}],
)
def test_a_single_file_goes_before_an_index_without_its_shards(
    index: dict[str, Any], tmp_path: Path
) -> None:
    files = {"model.safetensors": {"a": tensor(1)}}
    folder = folder_with(tmp_path, files, index)
    assert float(HFCheckpoint.open(folder).tensors["a"][0, 0]) == 1
    assert (note_on_weights(folder) or "").startswith(f"model.safetensors is read, and {INDEX}")


def test_an_index_of_the_single_file(tmp_path: Path) -> None:
    files = {"model.safetensors": {"a": tensor(1)}, FIRST: {"a": tensor(2)}}
    folder = folder_with(tmp_path, files, weight_map(a="model.safetensors"))
    assert float(HFCheckpoint.open(folder).tensors["a"][0, 0]) == 1
    assert note_on_weights(folder) is None
    (folder / INDEX).unlink()
    assert note_on_weights(folder) is None


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "modules.json"),
        *("model.safetensors", INDEX, FIRST),
    ],
)
def test_a_link_that_leads_nowhere_is_no_absent_file(name: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", {SECOND: {"a": tensor(1)}})
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("gone")
    message = failure(folder)
    assert name in message and "leads to no file" in message


def test_several_files_without_an_index(tmp_path: Path) -> None:
    tensors = HFCheckpoint.open(
        folder_with(tmp_path, {FIRST: {"a": tensor(1)}, SECOND: {"b": tensor(2)}})
    ).tensors
    assert {name: float(array[0, 0]) for name, array in tensors.items()} == {"a": 1, "b": 2}


def test_links_out_of_the_folder_are_followed_as_the_hub_s_cache_needs(tmp_path: Path) -> None:
    folder_with(tmp_path / "blobs", {"0a1b": {"a": tensor(1)}})
    folder = folder_with(tmp_path / "snapshot", {}, weight_map(a=FIRST))
    (folder / FIRST).symlink_to(Path("..", "blobs", "0a1b"))
    assert float(HFCheckpoint.open(folder).tensors["a"][0, 0]) == 1


def test_a_missing_folder_and_a_file_are_refused(tmp_path: Path) -> None:
    assert "there is no such folder" in failure(tmp_path / "absent")
    folder_with(tmp_path, {})
    assert "is a file, not a folder" in failure(tmp_path / "config.json")
    assert "there is no such folder" in failure("organisation/model-of-a-hub")


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("", "not valid JSON"),
        ("{'model_type': 1}", "not valid JSON"),
        ('{"a": 1', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": ' + "1" * 5000 + "}", "not valid JSON"),
        (b"\xff\xfe\xfd", "not valid JSON"),
        ("[1]", "holds a JSON list, not an object"),
        ("null", "holds a JSON NoneType, not an object"),
        ('{"a": 1, "b": 2, "a": 3}', "duplicate key 'a'"),
        ('{"rope": {"theta": 1, "theta": 2}}', "duplicate key 'theta'"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_bad_json_is_refused_by_file(
    name: str, text: str | bytes, phrase: str, tmp_path: Path
) -> None:
    message = failure(
        folder_with(tmp_path, {name: text, **({} if name == INDEX else {FIRST: {"a": tensor(1)}})})
    )
    assert str(tmp_path / name) in message and phrase in message


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"model.safetensors": {"a": tensor(1)}})
    (folder / "config.json").unlink()
    assert "config.json: there is no such file" in failure(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    assert "holds no weights" in failure(folder_with(tmp_path, {"tokenizer.json": "{}"}))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"]
)
def test_pickle_files_are_refused_and_never_opened(name: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {})
    os.mkfifo(folder / name)  # opening it would block for ever
    message = failure(folder)
    for phrase in (
        name,
        "refused because unpickling runs the code",
        "safetensors.torch.save_file",
        "publisher",
    ):
        assert phrase in message


def test_pickle_files_beside_safetensors_do_not_matter(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path, {"model.safetensors": {"a": tensor(1)}, "pytorch_model.bin": b"\x80\x02."}
    )
    assert list(HFCheckpoint.open(folder).tensors) == ["a"]


@pytest.mark.parametrize(
    ("index", "phrase"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": {}}, "has no weight_map"),
        ({"weight_map": [FIRST]}, "has no weight_map"),
        ({"weight_map": {"a": 1}}, "tensor 'a' maps to 1"),
        ({"weight_map": {"a": None}}, "tensor 'a' maps to None"),
        (weight_map(a=SECOND), f"'{SECOND}', which is missing"),
        (weight_map(a=""), "'', which is missing"),
        (weight_map(a="n" * 5000), "which is missing"),
        (weight_map(a="x\0y"), "which is missing"),
        (weight_map(a="\ud800"), "which is missing"),
        (weight_map(a=FIRST, b=FIRST), f"tensor 'b' is not in '{FIRST}'"),
        (weight_map(a="../outside.safetensors"), "'../outside.safetensors' outside its folder"),
        (weight_map(a="shards/../../outside.safetensors"), "outside its folder"),
        (weight_map(a="/etc/passwd"), "'/etc/passwd' outside its folder"),
    ],
)
def test_a_bad_index_is_refused(index: Any, phrase: str, tmp_path: Path) -> None:
    save_file({"a": tensor(1)}, tmp_path / "outside.safetensors")
    message = failure(folder_with(tmp_path / "model", {FIRST: {"a": tensor(1)}}, index))
    assert INDEX in message and phrase in message


def test_a_tensor_in_two_files_is_refused_unless_the_index_places_it(tmp_path: Path) -> None:
    files = {FIRST: {"a": tensor(1), "b": tensor(1)}, SECOND: {"a": tensor(2), "c": tensor(3)}}
    message = failure(folder_with(tmp_path, files))
    assert "tensor 'a'" in message and FIRST in message and SECOND in message
    assert "tensor 'a'" in failure(folder_with(tmp_path, files, weight_map(b=FIRST, c=SECOND)))


def test_a_damaged_shard_is_refused_by_name(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path, {FIRST: {"a": tensor(1)}, SECOND: {"b": tensor(2)}}, weight_map(a=FIRST, b=SECOND)
    )
    os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - 1)
    message = failure(folder)
    assert SECOND in message and "file not fully covered" in message


def test_a_real_checkpoint_reads_as_the_library_reads_it() -> None:
    data = os.environ.get("JAXSERVE_TEST_DATA")
    folder = Path(data or "", "models", "babyllama")
    if data is None or not folder.is_dir():
        pytest.skip("JAXSERVE_TEST_DATA names no folder with models/babyllama")
    checkpoint = HFCheckpoint.open(folder)
    assert (
        checkpoint.config["model_type"] == "llama" and checkpoint.config["num_hidden_layers"] == 5
    )
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": 2}
    oracle = load_file(folder / "model.safetensors")
    assert checkpoint.tensors.keys() == oracle.keys()
    for name, array in checkpoint.tensors.items():
        np.testing.assert_array_equal(array, oracle[name], strict=True)
        check_finite(name, array)
