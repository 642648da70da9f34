"""Reads parameters from an Orbax checkpoint that has a manifest of every file's hash.

    folder/orbax/           the parameters, which Orbax alone can load too: zarr3 chunks
    folder/config.json ...  the source's files other than weights
    folder/manifest.json    written last: without it nothing loads

Every chunk is a file of its own (no OCDBT) and uncompressed: a host reads and checks only chunks
that its slices touch, and weights hardly compress. Orbax itself does not notice a flipped byte; the
manifest's hashes do. Chunks are read with TensorStore, the library that Orbax uses, slice by slice
like a memory map.

A quantized weight is two arrays, "layers.0.qkv.values" and "layers.0.qkv.scales"; the manifest has
the name of the quantization scheme. int4 numbers are stored as pairs in uint8 (int4_packing.py), a
dtype that no parameter has; where the last dimension is odd they have a byte each.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import file_digest
from itertools import product
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Final, Self

import numpy as np
import tensorstore

from jaxserve.checkpoints.errors import CheckpointError, unreadable
from jaxserve.checkpoints.hf import Module, is_inside, read_configs
from jaxserve.checkpoints.int4_packing import INT4, unpaired
from jaxserve.checkpoints.safetensors_reader import parse_json_object

MANIFEST: Final = "manifest.json"
WEIGHTS: Final = "orbax"
METADATA: Final = "zarr.json"
FORMAT: Final = 1
CONVERT_AGAIN: Final = "convert the checkpoint again"
AS_STORED: Final = "auto"  # value of --weights for weights in full precision


@dataclass(frozen=True)
class File:
    """A file in the manifest: its size in bytes and its hash."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Contents of manifest.json; `source` and `weights` are as in OrbaxCheckpoint."""

    source: Mapping[str, str]
    weights: str
    files: Mapping[str, File]  # by path relative to the folder


class StoredArray:
    """A stored parameter that is read by slices, each chunk checked against the manifest.

    Args:
        folder: Folder whose subfolder `name` has the array.
        files: Files of the manifest.
    """

    def __init__(self, folder: Path, name: str, files: Mapping[str, File]) -> None:
        self._folder = folder
        self._name = name
        self._files = files
        self._checked = set[str]()  # names of chunks whose hashes were compared
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder / name}/"}}
        try:
            self._array = tensorstore.open(spec, read=True).result()
        except (ValueError, OSError) as error:
            raise CheckpointError(
                f"{folder / name}: cannot be opened ({error}); {CONVERT_AGAIN}"
            ) from error

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self._array.shape)
        return (*shape[:-1], 2 * shape[-1]) if self._paired else shape

    @property
    def dtype(self) -> np.dtype:
        return INT4 if self._paired else self._array.dtype.numpy_dtype

    @property
    def _paired(self) -> bool:
        return self._array.dtype.numpy_dtype == np.uint8

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Read slices; CheckpointError names a chunk that is not what was written."""
        if not self._paired:
            return self._read(index)
        asked = range(self.shape[-1])[index[-1]]
        pairs = self._read((*index[:-1], slice(asked.start // 2, -(-asked.stop // 2))))
        begin = asked.start % 2
        return unpaired(pairs)[..., begin : begin + len(asked)]

    def _read(self, index: tuple[slice, ...]) -> np.ndarray:
        chunks = [name for name in self._chunks(index) if name in self._files]
        unchecked = {name: self._files[name] for name in chunks if name not in self._checked}
        check_hashes(self._folder, unchecked)
        self._checked.update(unchecked)
        try:
            return np.asarray(self._array[index].read().result())
        except (ValueError, OSError) as error:
            raise CheckpointError(
                f"{self._folder / self._name}: cannot be read ({error}); {CONVERT_AGAIN}"
            ) from error

    def _chunks(self, index: tuple[slice, ...]) -> Iterator[str]:
        """Yield the files that these entries lie in; a chunk of zeros may have none."""
        sizes: Any = self._array.chunk_layout.read_chunk.shape
        whole = [range(size)[part] for size, part in zip(self._array.shape, index, strict=True)]
        grid = [
            range(part.start // n, -(-part.stop // n)) for part, n in zip(whole, sizes, strict=True)
        ]
        for place in product(*grid):
            yield str(PurePosixPath(self._name, "c", *map(str, place)))


@dataclass(frozen=True, eq=False)
class OrbaxCheckpoint:
    """A converted folder: the configs of its source, and parameters by path ("layers.0.qkv")."""

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    modules: tuple[Module, ...]
    # Dtype of every tensor that the parameters were made of, by the source's name.
    source: Mapping[str, str]
    weights: str  # quantization scheme as --weights names it, or auto
    tensors: Mapping[str, StoredArray]

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Open a folder; CheckpointError unless all files of the manifest exist in their size.

        Hashes are compared here, except those of chunks, which are compared when they are read.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        files = manifest.files
        _check_sizes(folder, files)
        _check_no_other(folder, files)
        check_hashes(folder, {name: file for name, file in files.items() if not _is_chunk(name)})
        paths = map(PurePosixPath, files)
        arrays = sorted(str(path.parent) for path in paths if path.name == METADATA)
        tensors = {PurePosixPath(name).name: StoredArray(folder, name, files) for name in arrays}
        configs = read_configs(folder) | {"source": manifest.source, "weights": manifest.weights}
        return cls(**configs, folder=folder, tensors=MappingProxyType(tensors))


def is_orbax(folder: Path) -> bool:
    """Return whether the folder was converted, completely or not."""
    return any(path.is_dir() or path.is_symlink() for path in folder.glob(f"{WEIGHTS}*"))


def write_manifest(folder: Path, source: Mapping[str, str], weights: str = AS_STORED) -> None:
    """Write the manifest, with the hashes of all other files of the folder.

    It has to be the last file of a conversion. `source` and `weights` are as in OrbaxCheckpoint.
    """
    names = sorted(_files_below(folder))
    hashes = _hashes(folder / name for name in names)
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digest}
        for name, digest in zip(names, hashes, strict=True)
    }
    text = json.dumps(
        {"format": FORMAT, "weights": weights, "source": dict(source), "files": files}, indent=1
    )
    (folder / MANIFEST).write_text(text + "\n")


def check_hashes(folder: Path, files: Mapping[str, File]) -> None:
    """Raise CheckpointError for the first file whose hash is not that of the manifest."""
    hashes = _hashes(folder / name for name in files)
    for (name, file), digest in zip(files.items(), hashes, strict=True):
        if digest != file.sha256:
            raise CheckpointError(
                f"{folder / name}: its sha256 is not that of {MANIFEST} (damaged or edited); "
                f"{CONVERT_AGAIN}"
            )


def _hashes(paths: Iterable[Path]) -> list[str]:
    paths = list(paths)
    with ThreadPoolExecutor() if len(paths) > 1 else nullcontext() as pool:
        return list(pool.map(_sha256, paths) if pool else map(_sha256, paths))


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def read_manifest(folder: Path) -> Manifest:
    """Read and validate manifest.json; CheckpointError when it is missing or damaged."""
    path = folder / MANIFEST
    try:
        manifest = parse_json_object(path.read_bytes(), path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: there is no such file: the conversion did not finish; {CONVERT_AGAIN}"
        ) from None
    except OSError as error:
        raise unreadable(path, error) from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: its format is {manifest.get('format')!r}, this version reads {FORMAT}; "
            f"{CONVERT_AGAIN}"
        )
    try:
        files = {
            name: File(int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in manifest["files"].items()
        }
        source = {str(name): str(dtype) for name, dtype in manifest["source"].items()}
        weights = str(manifest.get("weights", AS_STORED))  # older folders do not say it
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is no manifest of a conversion ({error!r}); {CONVERT_AGAIN}"
        ) from error
    for name in files:
        if not is_inside(name):
            raise CheckpointError(
                f"{path} names {name!r} outside its folder, which is refused; {CONVERT_AGAIN}"
            )
    return Manifest(source, weights, files)


def _check_sizes(folder: Path, files: Mapping[str, File]) -> None:
    for name, file in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{folder / name}: {error.strerror}, and {MANIFEST} lists it; {CONVERT_AGAIN}"
            ) from error
        if size != file.size:
            raise CheckpointError(
                f"{folder / name}: has {size:,} bytes, in {MANIFEST} {file.size:,}; {CONVERT_AGAIN}"
            )


def _check_no_other(folder: Path, files: Mapping[str, File]) -> None:
    """Raise CheckpointError for a file among the weights that the manifest does not list.

    A chunk of zeros has no file. A file in its place would be read without a hash to check.
    """
    for name in _files_below(folder / WEIGHTS):
        if f"{WEIGHTS}/{name}" not in files:
            raise CheckpointError(
                f"{folder / WEIGHTS / name}: is not in {MANIFEST}; remove it, or {CONVERT_AGAIN}"
            )


def _files_below(folder: Path) -> Iterator[str]:
    return (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _is_chunk(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return parts[0] == WEIGHTS and "c" in parts
