"""Opens a checkpoint in the Hugging Face folder layout.

The folder has config.json and one or several .safetensors files; an embedding model also has the
files of sentence-transformers.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Self

from jaxserve.checkpoints.errors import CheckpointError, unreadable
from jaxserve.checkpoints.safetensors_reader import (
    SafetensorsFile,
    Shard,
    parse_json,
    parse_json_object,
)

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODULES = "modules.json"
UNFINISHED = ".converting"  # suffix of a folder that jaxserve convert is still writing
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, eq=False)
class Module:
    """A sentence-transformers module: one step from texts to embeddings."""

    kind: str  # name of its class, such as Pooling
    file: str  # path of its configuration in the folder
    config: dict[str, Any]  # contents of that file, empty if it does not exist


@dataclass(frozen=True, eq=False)
class HFCheckpoint:
    """A Hugging Face model folder of any family: its configs and its tensors.

    open() reads and validates every header but no tensor's bytes: `tensors` holds read-only
    memory-mapped arrays, or what it was given instead.
    """

    folder: Path
    config: dict[str, Any]  # config.json
    generation_config: dict[str, Any]  # generation_config.json, empty if the folder has none
    modules: tuple[Module, ...]  # modules.json in its order, empty if the folder has none
    tensors: Mapping[str, Any]  # under the names of the files

    @classmethod
    def open(cls, folder: str | Path, tensors: Mapping[str, Any] | None = None) -> Self:
        """Open `folder`.

        The weights are the shards of model.safetensors.index.json, including tensors that the index
        does not list, so that the caller can report them; where there is no index, or a shard is
        missing, model.safetensors; else all *.safetensors files together. Pickle files are refused.

        Args:
            tensors: Tensors to use instead of the weights in the folder, such as those of the hub.
                They have shape and dtype, and are sliced as arrays are.

        Raises:
            CheckpointError: A file is at fault; the message names it.
        """
        folder = Path(folder)
        check_folder(folder)
        configs = read_configs(folder)
        found = _open_tensors(folder) if tensors is None else tensors
        return cls(**configs, folder=folder, tensors=MappingProxyType(dict(found)))


def check_folder(folder: Path) -> None:
    """Raise CheckpointError unless there is such a folder."""
    if not os.path.isdir(folder):
        problem = "is a file, not a folder" if os.path.exists(folder) else "there is no such folder"
        raise CheckpointError(
            f"{folder}: {problem}; give the folder that holds config.json and {SINGLE_FILE}, or "
            f"org/name of the hub"
        )


def read_configs(folder: Path) -> dict[str, Any]:
    """Read the files beside the weights: the fields config, generation_config and modules."""
    if folder.absolute().name.endswith(UNFINISHED):
        raise CheckpointError(
            f"{folder}: the conversion did not finish; remove it and convert the checkpoint again"
        )
    config = _read_json(folder / "config.json")
    return {
        "config": config,
        "generation_config": _read_optional(folder / "generation_config.json"),
        "modules": tuple(_read_modules(folder)) if os.path.lexists(folder / MODULES) else (),
    }


def _read_optional(path: Path) -> dict[str, Any]:
    # A link that leads nowhere is no absent file: in the hub's cache it is one that was lost.
    return _read_json(path) if os.path.lexists(path) else {}


def _read_json(path: Path) -> dict[str, Any]:
    return parse_json_object(_read(path), path)


def _read(path: Path) -> bytes:
    if not os.path.isfile(path):
        if os.path.islink(path):
            raise CheckpointError(f"{path}: the link leads to no file; download it again")
        raise CheckpointError(
            f"{path}: there is no such file; download the whole checkpoint, its JSON files included"
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def _read_modules(folder: Path) -> Iterator[Module]:
    path = folder / MODULES
    entries = parse_json(_read(path), path)
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, dict) or not all(
            isinstance(entry.get(name), str) for name in ("type", "path")
        ):
            raise CheckpointError(
                f"{path}: {entry!r} is no module with a type and a path; download the file again"
            )
        if not is_inside(entry["path"]):
            raise CheckpointError(
                f"{path} names the folder {entry['path']!r} outside its own, which is refused"
            )
        kind = entry["type"].rpartition(".")[2]
        name = "sentence_bert_config.json" if kind == "Transformer" else "config.json"
        file = str(PurePosixPath(entry["path"], name))
        yield Module(kind, file, _read_optional(folder / file))


def is_inside(name: str) -> bool:
    """Return whether a relative name stays inside its folder.

    The name alone decides: in the hub's cache every file of a model folder is a link to a file
    outside of it.
    """
    return not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts


def _open_tensors(folder: Path) -> dict[str, Any]:
    if _by_index(folder):
        files = sorted(set(read_weight_map(folder / INDEX).values()))
        return join_shards(folder, {file: _open_shard(folder, file) for file in files})
    if os.path.lexists(folder / SINGLE_FILE):
        return dict(SafetensorsFile(folder / SINGLE_FILE))
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise _no_weights(folder)
    return join_shards(folder, {file: SafetensorsFile(folder / file) for file in files})


def join_shards(folder: Path, shards: Mapping[str, Shard]) -> dict[str, Any]:
    """Return the tensors of all weight files of a model by name.

    Args:
        folder: Folder with the index, if the model has one.
        shards: Weight files by their names in the folder.

    Raises:
        CheckpointError: A tensor is not where the index puts it, or is in two files and in no
            index.
    """
    if not os.path.lexists(folder / INDEX):
        return _merge({}, shards.values())
    weight_map = read_weight_map(folder / INDEX)
    if not shards.keys() >= set(weight_map.values()):  # model.safetensors beside an old index
        return _merge({}, shards.values())
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise CheckpointError(
                f"{folder / INDEX}: tensor {name!r} is not in {file!r}, where the index puts it; "
                "download the index and that file again"
            )
    return _merge({name: shards[file][name] for name, file in weight_map.items()}, shards.values())


def _by_index(folder: Path) -> bool:
    """Return whether the weights are the shards that an index names.

    An index is what somebody has said of the weights, and so goes before a file that happens to
    have the usual name; but an old one, whose shards are gone, stays behind when a model is saved
    again as one file.
    """
    if not os.path.lexists(folder / INDEX):
        return False
    if not os.path.lexists(folder / SINGLE_FILE):
        return True
    try:
        files = set(read_weight_map(folder / INDEX).values())
    except CheckpointError:
        return False
    return all(os.path.lexists(folder / file) for file in files)


def note_on_weights(folder: Path) -> str | None:
    """Return a line on an index or a single file that is not read, since the other one counts."""
    single = folder / SINGLE_FILE
    index = folder / INDEX
    if not (os.path.lexists(single) and os.path.lexists(index)):
        return None
    if not _by_index(folder):
        return f"{SINGLE_FILE} is read, and {INDEX}, whose files are not there, is not"
    if SINGLE_FILE in read_weight_map(index).values():
        return None
    return f"the files of {INDEX} are read, and {SINGLE_FILE} is not"


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLE_SUFFIXES)
    if not pickles:
        return CheckpointError(
            f"{folder}: holds no weights ({SINGLE_FILE} or {INDEX}); download the whole checkpoint"
        )
    return CheckpointError(
        f"{folder}: holds only pickle files ({', '.join(pickles)}), refused because unpickling "
        f"runs the code in "
        "them; take the publisher's safetensors version, or convert where you trust them with "
        "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
    )


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, as an index says; CheckpointError if it is malformed."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index} has no weight_map of tensor names to file names; download the index again"
        )
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(
                f"{index}: tensor {name!r} maps to {file!r}, no file name; download the index again"
            )
    return weight_map


def _open_shard(folder: Path, file: str) -> SafetensorsFile:
    if not is_inside(file):
        raise CheckpointError(
            f"{folder / INDEX}: names the file {file!r} outside its folder, which is refused; "
            "move the shards beside the index and name them so"
        )
    if not os.path.isfile(folder / file):  # unlike Path.is_file, accepts every name
        raise CheckpointError(
            f"{folder / INDEX}: names the file {file!r}, which is missing; download it too"
        )
    return SafetensorsFile(folder / file)


def _merge(indexed: Mapping[str, Any], shards: Iterable[Shard]) -> dict[str, Any]:
    """Add to the indexed tensors all others of the shards.

    CheckpointError when two shards have a tensor that the index does not list.
    """
    tensors = dict(indexed)
    found_in: dict[str, Path] = {}
    for shard in shards:
        for name in (name for name in shard if name not in indexed):
            if name in found_in:
                raise CheckpointError(
                    f"{shard.path}: tensor {name!r} is also in {found_in[name].name} and no "
                    f"index says which to use; add {INDEX} or remove one of the files"
                )
            found_in[name] = shard.path
            tensors[name] = shard[name]
    return tensors
