"""Identity of checkpoints: equal only where the same files are read."""

import json
import os
import shutil
from pathlib import Path

import pytest

from jaxserve.checkpoints.hub.names import HubModel
from jaxserve.checkpoints.identity import UNKNOWN, identity
from jaxserve.loading.convert import to_orbax
from tests.jaxserve.loading.convert_harness import BUNDLED, silent

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_one_folder_is_the_same_by_every_path(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(BUNDLED)
    assert identity(BUNDLED) == identity(tmp_path / "link") != UNKNOWN


def test_a_copy_is_another_even_with_the_times_of_its_source(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(BUNDLED, copy)
    for file in copy.iterdir():
        source = (BUNDLED / file.name).stat()
        os.utime(file, ns=(source.st_atime_ns, source.st_mtime_ns))
    assert identity(copy) not in (identity(BUNDLED), UNKNOWN)


def test_a_file_that_is_written_to_is_another(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(BUNDLED, copy)
    before = identity(copy)
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    assert identity(copy) != before


def test_copies_of_a_converted_folder_are_the_same(tmp_path: Path) -> None:
    """All that is read of them is checked by the manifest."""
    to_orbax(BUNDLED, tmp_path / "one", silent)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    to_orbax(BUNDLED, tmp_path / "int8", silent, weights="int8")
    assert identity(tmp_path / "one") == identity(tmp_path / "two")
    assert identity(tmp_path / "int8") not in (identity(tmp_path / "one"), UNKNOWN)


def test_a_model_of_the_hub_is_its_commit(tmp_path: Path) -> None:
    assert identity(HubModel("org/name", COMMIT)) == identity(HubModel("org/name", COMMIT))
    assert identity(HubModel("org/name", "main")) == UNKNOWN
    assert identity(tmp_path / "nowhere") == identity(tmp_path) == UNKNOWN


def test_files_that_the_index_names_count_wherever_they_lie(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(BUNDLED, copy)
    (copy / "sub").mkdir()
    (copy / "model.safetensors").rename(copy / "sub" / "weights")
    index = {"weight_map": {"model.norm.weight": "sub/weights"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    before = identity(copy)
    (copy / "sub" / "weights").write_bytes(b"?")
    assert before != UNKNOWN and identity(copy) != before


def test_a_changed_configuration_counts(tmp_path: Path) -> None:
    """It says how the numbers of some quantized checkpoints are meant."""
    copy = tmp_path / "copy"
    shutil.copytree(BUNDLED, copy)
    before = identity(copy)
    (copy / "config.json").write_text((copy / "config.json").read_text() + "\n")
    assert identity(copy) != before


@pytest.mark.parametrize("name", ["/dev/zero", "../outside", "missing", "a\0b", "sub"])
def test_an_index_that_leads_elsewhere_is_of_no_use(tmp_path: Path, name: str) -> None:
    """The checkpoint is refused when it is opened; nothing outside of it is read before."""
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED, folder)
    (folder / "sub").mkdir()
    (tmp_path / "outside").write_bytes(b"?")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    assert identity(folder) == UNKNOWN
