"""Damaged folders and conversions that were stopped: nothing of them loads."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest

from jaxserve.checkpoints import orbax_store
from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hf import UNFINISHED
from jaxserve.checkpoints.orbax_store import MANIFEST, WEIGHTS
from jaxserve.errors import ModelError
from jaxserve.loading import convert
from jaxserve.loading.convert import to_orbax
from jaxserve.loading.folder import load, open_model
from jaxserve.loading.spec import open_checkpoint
from tests.jaxserve.loading.convert_harness import (
    BUNDLED,
    ROOT,
    chunk_of,
    flip,
    mesh,
    silent,
)
from tests.jaxserve.loading.loaded import load_params
from tests.slow_cases import slow_but


def test_nan_in_a_converted_folder_is_refused(spoiled: Path) -> None:
    """NaN is refused even when the hashes are right."""
    data = bytearray(chunk_of(spoiled).read_bytes())
    data[:4] = np.float32("nan").tobytes()
    chunk_of(spoiled).write_bytes(data)
    (spoiled / MANIFEST).unlink()
    orbax_store.write_manifest(spoiled, {})
    with pytest.raises(
        CheckpointError, match=r"tensor 'layers.0.qkv': 1 of .* values are NaN or infinite"
    ):
        load_params(open_checkpoint(spoiled), mesh())


@pytest.mark.parametrize("name", ["chunk", "zarr.json", "config.json", "_METADATA"])
def test_a_flipped_bit_is_refused(name: str, spoiled: Path) -> None:
    path = chunk_of(spoiled) if name == "chunk" else next(spoiled.rglob(name))
    flip(path)
    with pytest.raises(CheckpointError, match=r"its sha256 is not that of manifest.json") as error:
        load_params(open_checkpoint(spoiled), mesh())
    assert str(path) in str(error.value)


def test_orbax_itself_reads_a_flipped_bit(spoiled: Path) -> None:
    """Orbax does not notice a flipped bit, so that chunks have to be hashed."""
    before: Any = ocp.load(spoiled / "orbax")
    flip(chunk_of(spoiled))
    after: Any = ocp.load(spoiled / "orbax")
    assert before["layers"]["0"]["qkv"].tobytes() != after["layers"]["0"]["qkv"].tobytes()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda folder: (folder / MANIFEST).unlink(),
            "manifest.json: there is no such file: the conversion did not",
        ),
        (lambda folder: (folder / MANIFEST).write_text("{"), "manifest.json: not valid JSON"),
        (
            lambda folder: (folder / MANIFEST).write_text('{"format": 1}'),
            "manifest.json is no manifest",
        ),
        (
            lambda folder: (folder / MANIFEST).write_text('{"format": 2}'),
            "its format is 2, this version reads 1",
        ),
        (
            lambda folder: chunk_of(folder).unlink(),
            r"qkv/c/\S+: No such file or directory, and manifest.json lists it",
        ),
        (
            lambda folder: os.truncate(chunk_of(folder), 9),
            r"qkv/c/\S+: has 9 bytes, in manifest.json",
        ),
        (
            lambda folder: chunk_of(folder).with_name("99").write_text(""),
            r"qkv/c/\S*99: is not in manifest.json",
        ),
        (
            lambda folder: wrong_hash(folder, "config.json"),
            "config.json: its sha256 is not that of manifest.json",
        ),
        (
            lambda folder: wrong_hash(folder, str(chunk_of(folder).relative_to(folder))),
            "qkv/c/.*its sha256 is not",
        ),
        (lambda folder: outside(folder), "names '../x' outside its folder"),
    ],
)
def test_damage_is_refused_with_the_name_of_the_file(
    spoil: Callable[[Path], None], said: str, spoiled: Path
) -> None:
    spoil(spoiled)
    with pytest.raises(CheckpointError, match=said) as error:
        load_params(open_checkpoint(spoiled), mesh())
    assert "\n" not in str(error.value)


def wrong_hash(folder: Path, name: str) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][name]["sha256"] = "0" * 64
    (folder / MANIFEST).write_text(json.dumps(manifest))


def outside(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"]["../x"] = {"bytes": 0, "sha256": ""}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_parameters_of_another_config_are_refused(spoiled: Path) -> None:
    config = json.loads((spoiled / "config.json").read_text())
    (spoiled / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    (spoiled / MANIFEST).unlink()
    orbax_store.write_manifest(spoiled, {})
    with pytest.raises(
        ModelError, match=r"does not fit the stored parameters: layers.1.\S+, .* are only in one"
    ):
        load_params(open_checkpoint(spoiled), mesh())


KILLED = """
import os, sys
from pathlib import Path
from jaxserve.checkpoints import orbax_writer
from jaxserve.loading import convert
from jaxserve.loading.convert import to_orbax, to_hf
point, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
calls = 0

def die(work):
    def until(*args, **kwargs):
        global calls
        calls += 1
        if calls == 2 or point != "layer":
            os._exit(9)
        return work(*args, **kwargs)
    return until

for holder, name in {
    "layer": ((orbax_writer.ocp.partial, "save"),),
    "finalize": ((orbax_writer.ocp.partial, "finalize"),),
    "configs": ((convert, "copy_other_files"),),
    "manifest": ((convert, "write_manifest"), (convert, "save_file")),
    "rename": ((Path, "rename"),),
}[point]:
    setattr(holder, name, die(getattr(holder, name)))
(to_hf if (source / "manifest.json").exists() else to_orbax)(source, target, lambda *_: None)
"""


def kill_at(point: str, source: Path, target: Path) -> None:
    command = [sys.executable, "-c", KILLED, point, str(source), str(target)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    assert (
        subprocess.run(
            command, cwd=ROOT, env=environment, check=False, capture_output=True
        ).returncode
        == 9
    )


POINTS = ("layer", "finalize", "configs", "manifest", "rename")


@pytest.mark.system
@pytest.mark.parametrize("point", slow_but(POINTS, ("layer", "rename")))
def test_a_killed_conversion_leaves_nothing_that_loads(point: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    kill_at(point, BUNDLED, target)
    left = target.with_name(target.name + UNFINISHED)
    assert [path.name for path in tmp_path.iterdir()] == [left.name], (
        "nothing has the name that was asked for"
    )
    with pytest.raises(
        CheckpointError, match=f"{left} is there already .*interrupted: then remove it"
    ):
        to_orbax(BUNDLED, target, silent)
    with pytest.raises(CheckpointError, match=f"{left}.*the conversion did not finish"):
        load(open_model(left), mesh())


@pytest.mark.system
@pytest.mark.parametrize("point", slow_but(("manifest", "rename"), ("manifest",)))
def test_a_killed_conversion_back(
    point: str, converted: Callable[[str], Path], tmp_path: Path
) -> None:
    target = tmp_path / "target"
    kill_at(point, converted("phi3_window"), target)
    left = target.with_name(target.name + UNFINISHED)
    assert [path.name for path in tmp_path.iterdir()] == [left.name]
    with pytest.raises(CheckpointError, match=f"{left}: the conversion did not finish"):
        open_checkpoint(left)


def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "write_manifest", full)
    with pytest.raises(
        CheckpointError, match=r"target.converting cannot be written .*No space left"
    ):
        to_orbax(BUNDLED, tmp_path / "target", silent)
    assert not list(tmp_path.iterdir())


def test_a_link_to_arrays_that_leads_nowhere(tmp_path: Path) -> None:
    """The weights beside it are not taken instead."""
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED, folder)
    (folder / WEIGHTS).symlink_to("gone")
    with pytest.raises(CheckpointError, match="convert the checkpoint again"):
        open_checkpoint(folder)
