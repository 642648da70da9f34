"""What a family file provides: how its config.json is read, and the table of its weights."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxserve.errors import ModelError
from jaxserve.models.fused import PARTS, place
from jaxserve.models.spec import ModelSpec

Within = Mapping[str, slice]  # letter -> which entries of that dimension; of those not named, all


class Stored(Protocol):
    """A tensor as a checkpoint holds it: an array, or what gives parts of one when they are asked
    for.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __getitem__(self, index: Any, /) -> np.ndarray: ...


class _Dimension(NamedTuple):
    """Of a checkpoint's tensor: the letters that it flattens; `alternatives` lie one after the
    other in the last.
    """

    letters: str
    alternatives: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tensor:
    """One row of a weight-name table: a tensor of the checkpoint, or a part of it, and the
    parameter it belongs to.

    path: where the parameter stands in the pytree; "q", "gate" and the like stand for their part of
    a fused one (models/fused.py). axes: the checkpoint's dimensions as letters; one that flattens
    several is written in parentheses, "(KGH)D" for a q_proj weight; what lies in it one after the
    other in brackets, "([KGH|KH|KH])D" for a fused qkv. part: which of those in brackets it is.
    expert: whose it is, where each expert has its own. scales: for a quantized weight's scales, the
    letter in place of those summed over, and how many there are along it.
    """

    name: str
    path: tuple[str | int, ...]
    axes: str
    part: int = 0
    expert: int | None = None
    scales: tuple[str, int] | None = None

    @property
    def block(self) -> str:
        """Of a layer's parameters those it is among, where they are a pytree of their own: see
        ModelSpec.sizes.
        """
        return str(self.path[2]) if len(self.path) > 3 else ""

    def sizes(self, spec: ModelSpec) -> dict[str, int]:
        """Of every dimension that it can have, by letter."""
        return spec.sizes(self.block) | dict([self.scales] if self.scales else [])

    def places(self, sizes: Mapping[str, int]) -> dict[str, tuple[str, slice]]:
        """Of the parameter's letters those along which it is one of several: its own letters there,
        and its entries.
        """
        fused = place(str(self.path[-1]), sizes) if self.path[-1] in PARTS else {}
        return (
            fused
            if self.expert is None
            else fused | {"E": ("", slice(self.expert, self.expert + 1))}
        )

    def size(self, axes: str, sizes: Mapping[str, int]) -> int:
        """How many numbers it has of a parameter with these axes."""
        places = self.places(sizes)
        own = (places[x][1].stop - places[x][1].start if x in places else sizes[x] for x in axes)
        return prod(own)

    def shape(self, sizes: Mapping[str, int]) -> list[int]:
        """Of the whole tensor in the checkpoint."""
        return [_size(dimension, sizes) for dimension in _dimensions(self.axes)]

    def read(
        self, stored: Stored, sizes: Mapping[str, int], wanted: str, within: Within
    ) -> np.ndarray:
        """The dimensions `wanted` of it, letters in parentheses flattened, and of some letters only
        what is `within`.

        A view where that is possible. ModelError when the tensor's shape is not what config.json
        makes it.
        """
        dimensions = list(_dimensions(self.axes))
        shape = self.shape(sizes)
        if list(stored.shape) != shape:
            raise ModelError(
                f"tensor {self.name} has shape {list(stored.shape)}; config.json makes it "
                f"{shape} ({self.axes})"
            )
        cuts = [
            _cut(*each, self.part, sizes, within) for each in zip(dimensions, shape, strict=True)
        ]
        part = stored[tuple(cut.index for cut in cuts)]
        part = part.reshape([n for cut in cuts for n in cut.split])[
            tuple(i for cut in cuts for i in cut.part)
        ]
        letters = "".join(cut.letters for cut in cuts)
        part = part.reshape([n for cut in cuts for n in cut.sizes])[
            tuple(i for cut in cuts for i in cut.rest)
        ]
        groups = list(_groups(wanted))
        part = part.transpose([letters.index(letter) for letter in "".join(groups)])
        lengths = iter(part.shape)
        return part.reshape([prod(next(lengths) for _ in group) for group in groups])


class _Cut(NamedTuple):
    """How one of a checkpoint's dimensions is read: each field serves the step after the one
    before.
    """

    index: slice  # of the stored dimension
    split: list[int]  # its letters' sizes, all alternatives as one
    part: list[slice]  # the alternative that is wanted
    sizes: list[int]  # of all letters
    rest: list[slice]  # what is wanted of the letters that `index` does not cut
    letters: str


def _cut(
    dimension: _Dimension, size: int, part: int, sizes: Mapping[str, int], within: Within
) -> _Cut:
    outer, inner = [sizes[letter] for letter in dimension.letters], list[int]()
    index, cut, letters = slice(None), [slice(None)] * len(outer), dimension.letters
    if outer and letters[0] in within:  # before anything is read
        wanted, each = within[letters[0]], size // outer[0]
        index, outer[0] = slice(wanted.start * each, wanted.stop * each), wanted.stop - wanted.start
    split = list(outer)
    if dimension.alternatives:
        inner = [sizes[letter] for letter in dimension.alternatives[part]]
        lengths = [prod(sizes[letter] for letter in own) for own in dimension.alternatives]
        split.append(sum(lengths))
        cut.append(slice(sum(lengths[:part]), sum(lengths[: part + 1])))
        letters += dimension.alternatives[part]
    all_of_it = slice(None)
    rest = [
        within.get(letter, all_of_it) if i or not outer else all_of_it
        for i, letter in enumerate(letters)
    ]
    return _Cut(index, split, cut, outer + inner, rest, letters)


def _size(dimension: _Dimension, sizes: Mapping[str, int]) -> int:
    together = sum(prod(sizes[letter] for letter in letters) for letters in dimension.alternatives)
    return prod(sizes[letter] for letter in dimension.letters) * (
        together if dimension.alternatives else 1
    )


def _dimensions(axes: str) -> Iterator[_Dimension]:
    """ "(N[U|IJ])D" -> N with the alternatives U and IJ, D."""
    for group in _groups(axes):
        letters, _, alternatives = group.removesuffix("]").partition("[")
        yield _Dimension(letters, tuple(alternatives.split("|")) if alternatives else ())


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
    """A model family: how its config.json becomes a ModelSpec, and its weight-name table.

    ignored: patterns of names, as in file names, of tensors that checkpoints have and inference
    does not need.
    """

    spec_from_hf: Callable[[Mapping[str, Any]], ModelSpec]
    tensors: Callable[[ModelSpec], list[Tensor]]
    ignored: Callable[[ModelSpec], tuple[str, ...]] = lambda spec: ()


def without_frequencies(spec: ModelSpec) -> tuple[str, ...]:
    """What old checkpoints carry without need."""
    return ("*rotary_emb.inv_freq",)
