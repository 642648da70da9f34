"""Weights that are read from the hub by ranges, so that a host fetches only its part of them."""

import math
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
from huggingface_hub import constants

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hf import join_shards
from jaxserve.checkpoints.hub.files import weight_files
from jaxserve.checkpoints.hub.lookup import HubFile, Snapshot
from jaxserve.checkpoints.hub.remote_file import RemoteFile
from jaxserve.checkpoints.safetensors_reader import SafetensorsFile, Shard, parse_json_object

HEADER_GUESS: Final = 2**18  # bytes of a file's start that are read at first
MAX_HEADER: Final = 100 * 2**20  # the safetensors library's bound
SMALL: Final = 2**16  # bytes of a tensor that is read at once, with those that lie near it
GAP: Final = 2**18  # bytes between two such tensors that are read with them
FILES_AT_ONCE: Final = 8  # files that are opened at a time
KEPT: Final = 2 * 2**30  # bytes of tensors that are kept, for the next shard of the same tensor


def remote_tensors(snapshot: Snapshot) -> dict[str, Any]:
    """Return the tensors of a model by name, of which slices are read when they are asked for.

    Small tensors are read at once, as arrays. An index is fetched into the hub's cache. The sha256
    of a file cannot be checked by its parts; commit, content and size are checked with each range.
    CheckpointError in one line: the hub cannot be asked, or a file is not what it listed.
    """
    files = snapshot.files
    if files is None:
        raise CheckpointError(
            f"{snapshot.model}: several hosts read their parts of the weights from "
            f"{constants.ENDPOINT}, which does not answer (give a folder that all hosts have)"
        )
    names = [name for name in weight_files(snapshot, files) if name.endswith(".safetensors")]
    kept = _Kept(KEPT)
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        opened = pool.map(lambda name: RemoteSafetensors(snapshot, files[name], kept), names)
        return join_shards(snapshot.folder, dict(zip(names, opened, strict=True)))


class RemoteSafetensors(Shard):
    """Tensors of one .safetensors file on the hub, by name.

    Opening reads the header, which is checked as that of a file on the disk, and the small tensors.
    """

    def __init__(self, snapshot: Snapshot, file: HubFile, kept: "_Kept"):
        self.path = Path(snapshot.model.repo, file.path)
        self._file = RemoteFile(snapshot, file)
        header = self._header()
        self._tensors = {}
        small = list[_Place]()
        for place in self._places(header):
            if len(place.shape) < 2 or place.nbytes <= SMALL:
                small.append(place)
            else:
                self._tensors[place.name] = RemoteTensor(self._file, place, kept)
        for group in _neighbours(small):
            self._tensors |= self._arrays(group)

    def _arrays(self, places: list["_Place"]) -> dict[str, np.ndarray]:
        """Read tensors that lie near each other, at once."""
        begin = places[0].start
        raw = self._file.read(begin, places[-1].stop)
        raw.flags.writeable = False
        return {
            place.name: raw[place.start - begin : place.stop - begin]
            .view(place.dtype)
            .reshape(place.shape)
            for place in places
        }

    def _header(self) -> bytes:
        """Return the start of the file: the length of the header, and the header."""
        size = self._file.size
        start = self._file.read(0, min(HEADER_GUESS, size)).tobytes()
        end = 8 + int.from_bytes(start[:8], "little")
        if not 8 < end <= min(8 + MAX_HEADER, size):
            raise CheckpointError(f"{self.path}: not a valid safetensors file; ask its publisher")
        if end > len(start):
            start += self._file.read(len(start), end).tobytes()
        return start[:end]

    def _places(self, header: bytes) -> list["_Place"]:
        """Return what the header says, which a file of holes is checked with.

        The safetensors library and SafetensorsFile then validate it as any other.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, self.path.name)
            with path.open("wb") as holes:
                holes.write(header)
                holes.truncate(self._file.size)
            try:
                tensors = SafetensorsFile(path)
            except CheckpointError as error:
                problem = str(error).replace(str(path), str(self.path))
                raise CheckpointError(problem) from None
        entries = parse_json_object(header[8:], self.path)
        return [
            _Place(name, len(header) + entries[name]["data_offsets"][0], array.shape, array.dtype)
            for name, array in tensors.items()
        ]


@dataclass(frozen=True)
class _Place:
    """A tensor in a file."""

    name: str
    start: int  # of its bytes, from the start of the file
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


class RemoteTensor:
    """A tensor of a file on the hub. Indexing it reads the rows that are asked for, and no others.

    Rows are entries of the first dimension; they are read whole. The rows that were read last are
    kept for a while, since several devices may need other columns of the same rows.
    """

    def __init__(self, file: RemoteFile, place: _Place, kept: "_Kept"):
        self.shape = place.shape
        self.dtype = place.dtype
        self.ndim = len(place.shape)
        self.size = math.prod(place.shape)
        self._file = file
        self._place = place
        self._kept = kept

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return a read-only array of an index: an int, a slice without a step, or a tuple."""
        first, *others = index if isinstance(index, tuple) else (index,)
        if not isinstance(first, slice):
            row = range(len(self))[first]
            return self._rows(row, row + 1)[(0, *others)]
        start, stop, step = first.indices(len(self))
        if step != 1:
            raise TypeError(f"a slice of rows has the step {step}; it must be 1")
        return self._rows(start, max(start, stop))[(slice(None), *others)]

    def _rows(self, start: int, stop: int) -> np.ndarray:
        found = self._kept.get(self, start, stop)
        if found is None:
            found = self._read(start, stop)
            self._kept.add(self, start, found)
        return found

    def _read(self, start: int, stop: int) -> np.ndarray:
        row = self._place.nbytes // max(1, len(self))
        begin = self._place.start
        raw = self._file.read(begin + start * row, begin + stop * row)
        array = raw.view(self.dtype).reshape(stop - start, *self.shape[1:])
        array.flags.writeable = False
        return array


class _Kept:
    """Rows of the tensors that were read last, up to a number of bytes."""

    def __init__(self, limit: int):
        self._limit = limit
        self._rows: OrderedDict[tuple[RemoteTensor, int, int], np.ndarray] = OrderedDict()
        self._lock = Lock()

    def get(self, tensor: RemoteTensor, start: int, stop: int) -> np.ndarray | None:
        """Return these rows of a tensor if just they are kept, or all of its rows."""
        with self._lock:
            for first, last in ((start, stop), (0, len(tensor))):
                rows = self._rows.get((tensor, first, last))
                if rows is not None:
                    self._rows.move_to_end((tensor, first, last))
                    return rows[start - first : stop - first]
        return None

    def add(self, tensor: RemoteTensor, start: int, rows: np.ndarray) -> None:
        """Keep rows, and forget the oldest."""
        with self._lock:
            self._rows[tensor, start, start + len(rows)] = rows
            while self._rows and sum(each.nbytes for each in self._rows.values()) > self._limit:
                self._rows.popitem(last=False)


def _neighbours(places: Iterable[_Place]) -> Iterator[list[_Place]]:
    """Group tensors whose distance in the file is small."""
    group = list[_Place]()
    for place in sorted(places, key=lambda place: place.start):
        if group and place.start - group[-1].stop > GAP:
            yield group
            group = []
        group.append(place)
    if group:
        yield group
