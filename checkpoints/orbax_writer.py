"""Writes parameters as an Orbax checkpoint.

Reading is a module of its own (orbax_store) that does not import Orbax, which takes seconds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from jaxserve.checkpoints.int4_packing import INT4, paired
from jaxserve.checkpoints.orbax_store import WEIGHTS

CHUNK_BYTES: Final = 32 * 2**20
# Axes that meshes split (experts, kv heads, query heads): a chunk has one entry of each. Other axes
# are split by size alone.
ONE_PER_CHUNK: Final = "EKN"

Saving = ocp.options.ArrayOptions.Saving


class Writer:
    """Writer of folder/orbax that keeps one layer at a time in memory."""

    def __init__(self, folder: Path, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._path = str(folder.absolute() / WEIGHTS)
        self._chunk_bytes = chunk_bytes
        self._layer: Sequence[str | int] = ()  # path of the layer that waits to be written
        self._waiting: dict[str, Any] = {}
        self._axes: dict[str, str] = {}

    def add(self, path: Sequence[str | int], axes: str, parameter: Any) -> None:
        """Add a parameter; write the layer before when another one begins.

        Args:
            axes: Letters of the parameter's dimensions.
            parameter: Array, or pytree of arrays under one path.
        """
        if path[:2] != self._layer:
            self._write()
            self._layer = path[:2]
        for keys, leaf in jax.tree.leaves_with_path(parameter):
            name = [*map(str, path), *_names(keys)]
            array = np.asarray(leaf)
            self._axes[".".join(name)] = axes if array.ndim == len(axes) else ""
            if array.dtype == INT4 and array.shape[-1] % 2 == 0:
                array = paired(array)
            holder = self._waiting
            for step in name[:-1]:
                holder = holder.setdefault(step, {})
            holder[name[-1]] = array
        if len(path) == 1:  # embedding or head, each of which is as large as layers
            self._write()

    def finish(self) -> None:
        """Write the last layer and complete the checkpoint."""
        self._write()
        with self._options():
            ocp.partial.finalize(self._path)

    def _write(self) -> None:
        if self._waiting:
            with self._options():
                ocp.partial.save(self._path, self._waiting)
        self._waiting = {}

    def _options(self) -> ocp.Context:
        context = ocp.Context()
        saving = context.array.saving
        saving.use_ocdbt = False
        saving.use_zarr3 = True
        saving.use_compression = False
        saving.scoped_storage_options_creator = self._chunking
        return context

    def _chunking(self, key: Any, value: Any) -> Saving.StorageOptions:
        axes = self._axes[".".join(_names(key))]
        split = tuple(i for i, letter in enumerate(axes) if letter in ONE_PER_CHUNK)
        return Saving.StorageOptions(chunk_byte_size=self._chunk_bytes, shard_axes=split)


def _names(keys: Any) -> list[str]:
    return [jax.tree_util.keystr((key,), simple=True) for key in keys]
