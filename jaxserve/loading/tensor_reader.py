"""Reads parts of parameters from stored tensors, with the copies of kv heads that a mesh needs."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxserve.checkpoints.safetensors_reader import check_finite
from jaxserve.models.families.weight_table import Stored, Tensor, groups_of
from jaxserve.models.quantize import Ranges
from jaxserve.models.spec import ModelSpec

# Entries of a tile of `_copy`: along the dimension that is contiguous in the file, and along the
# one that is contiguous in the target.
FILE_TILE = 128
TARGET_TILE = 32


class TensorReader:
    """Reader of the tensors of a checkpoint, for devices with the architecture `held`.

    A kv head that several devices need is stored once and held in copies, among which its queries
    are divided.
    """

    def __init__(self, tensors: Mapping[str, Stored], held: ModelSpec) -> None:
        self._tensors = tensors
        self._held = held
        self._spec = held.single  # of the checkpoint

    def read(self, rows: Sequence[Tensor], axes: str, dtype: np.dtype, asked: Ranges) -> np.ndarray:
        """Read the entries `asked` along each axis of a parameter that consists of these tensors.

        Raises CheckpointError when a number is NaN or infinite, in the file or as `dtype`, and
        ModelError when a tensor's shape does not follow from config.json.
        """
        found = np.empty([len(part) for part in asked], dtype)
        for row in rows:
            overlap = _overlap(row, self._held, axes, asked)
            if overlap is None:
                continue
            values = self._read_tensor(row, overlap)
            target = found[overlap.target]
            with np.errstate(over="ignore", invalid="ignore"):
                _copy(values[overlap.source], target)
            if jnp.issubdtype(values.dtype, jnp.floating):
                # Numbers of a narrower type may be infinite where those in the file are not.
                narrower = dtype.itemsize < values.dtype.itemsize
                check_finite(row.name, target if narrower else values)
        return found

    def _read_tensor(self, row: Tensor, overlap: "_Overlap") -> np.ndarray:
        """Read a tensor as Tensor.read does, with the copies of its kv heads."""
        stored = self._tensors[row.name]
        sizes = row.sizes(self._spec)
        wanted = overlap.wanted
        copies = self._held.kv_copies
        if copies == 1 or "K" not in wanted:
            return row.read(stored, sizes, wanted, overlap.within)
        heads = overlap.within["K"]
        first = heads.start // copies
        within = overlap.within | {"K": slice(first, -(-heads.stop // copies))}
        spread = _copy_heads(row.read(stored, sizes, wanted, within), wanted, copies)
        asked = slice(heads.start - first * copies, heads.stop - first * copies)
        return spread[tuple(asked if own == "K" else slice(None) for own in groups_of(wanted))]


class _Overlap(NamedTuple):
    """The entries that one tensor contributes to one shard of its parameter."""

    wanted: str  # letters to read, in the parameter's order
    within: dict[str, slice]  # letter -> entries to read, for letters that are not fused
    source: tuple[slice, ...]  # what is used of the dimensions that are read
    target: tuple[slice | int, ...]  # where it goes in the shard


def _overlap(row: Tensor, held: ModelSpec, axes: str, asked: Sequence[range]) -> _Overlap | None:
    """Intersect a tensor's part of its parameter with the entries `asked`; None if disjoint."""
    fused = row.fused_slices(row.sizes(held))
    wanted = ""
    within = dict[str, slice]()
    source = list[slice]()
    target = list[slice | int]()
    for letter, part in zip(axes, asked, strict=True):
        if letter not in fused:
            wanted += letter
            within[letter] = slice(part.start, part.stop)
            source.append(slice(None))
            target.append(slice(None))
            continue
        letters, at = fused[letter]
        begin = max(at.start, part.start)
        end = min(at.stop, part.stop)
        if begin >= end:
            return None
        if letters:
            wanted += letters
            source.append(slice(begin - at.start, end - at.start))
            target.append(slice(begin - part.start, end - part.start))
        else:  # the tensor is a single entry along this axis and lacks the dimension
            target.append(begin - part.start)
    return _Overlap(wanted, within, tuple(source), tuple(target))


def _copy_heads(view: np.ndarray, axes: str, copies: int) -> np.ndarray:
    """Repeat every kv head; its queries (G, which follows K) are divided among the copies."""
    at = list(groups_of(axes)).index("K")
    if "G" not in axes:
        return view.repeat(copies, axis=at)
    heads, queries = view.shape[at : at + 2]
    return view.reshape(*view.shape[:at], heads * copies, queries // copies, *view.shape[at + 2 :])


def _copy(view: np.ndarray, target: np.ndarray) -> None:
    """Copy an array, in tiles where the view transposes a matrix.

    NumPy alone takes three times as long there, since it misses the cache in every row.
    """
    contiguous = int(np.argmin(view.strides)) if view.ndim else 0  # dimension, in the file
    if contiguous >= view.ndim - 1:
        target[...] = view
        return
    tile = [1] * view.ndim
    tile[contiguous] = FILE_TILE
    tile[-1] = TARGET_TILE
    starts = [range(0, size, step) for size, step in zip(view.shape, tile, strict=True)]
    for corner in product(*starts):
        at = tuple(slice(start, start + step) for start, step in zip(corner, tile, strict=True))
        target[at] = view[at]
