"""What a family file provides: how its config.json is read, and the table of its weights."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from jaxserve.errors import ModelError
from jaxserve.models.spec import ModelSpec


@dataclass(frozen=True)
class Tensor:
    """One row of a weight-name table: a tensor of the checkpoint, and the view of it that a parameter is, or holds.

    path: where the parameter stands in the pytree; "q", "gate" and the like stand for their part of a fused one
    (models/fused.py). axes: the checkpoint's dimensions as letters, a dimension that flattens several written in
    parentheses, e.g. "(KGH)D" for a q_proj weight. parts: what the tensor's first dimension
    holds one after the other, where that is more than this parameter, e.g. NH, KH, KH; part: which of them it is.
    """

    name: str
    path: tuple[str | int, ...]
    axes: str
    parts: tuple[str, ...] = ()
    part: int = 0

    def view(self, array: np.ndarray, sizes: Mapping[str, int], wanted: str) -> np.ndarray:
        """The checkpoint's array with the dimensions `wanted`: no copy. ModelError when its shape is another."""
        groups = list(_groups(self.axes))
        shape = [_size(group, sizes) for group in groups]
        parts = [_size(part, sizes) for part in self.parts] or shape[:1]
        whole = [sum(parts), *shape[1:]]
        if list(array.shape) != whole:
            raise ModelError(
                f"tensor {self.name} has shape {list(array.shape)}; config.json makes it {whole} ({self.axes})"
            )
        begin = sum(parts[: self.part])
        letters = "".join(groups)
        split = array[begin : begin + parts[self.part]].reshape([sizes[letter] for letter in letters])
        return split.transpose([letters.index(letter) for letter in wanted])


def _size(letters: str, sizes: Mapping[str, int]) -> int:
    return prod(sizes[letter] for letter in letters)


def _groups(axes: str) -> Iterator[str]:
    """ "(NH)D" -> "NH", "D"."""
    while axes:
        if axes[0] == "(":
            group, axes = axes[1:].split(")", 1)
            yield group
        else:
            yield axes[0]
            axes = axes[1:]


@dataclass(frozen=True)
class Family:
    """A model family: how its config.json becomes a ModelSpec, and its weight-name table."""

    spec_from_hf: Callable[[Mapping[str, Any]], ModelSpec]
    tensors: Callable[[ModelSpec], list[Tensor]]
    ignored_tensors: tuple[str, ...] = ()  # suffixes of tensors that old checkpoints carry without need
