"""The parts of a family file: a reader of config.json, and the table of the weights' names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxserve.errors import ModelError
from jaxserve.models.fused import PARTS, fused_slice, head_slice
from jaxserve.models.spec import ModelSpec

ParamPath = tuple[str | int, ...]  # place in the tree of parameters, as ("layers", 0, "qkv")
Within = Mapping[str, slice]  # letter -> entries to read along it; absent letters are read whole


class Stored(Protocol):
    """A tensor as a checkpoint holds it: an array, or an object that reads slices on demand."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __getitem__(self, index: Any, /) -> np.ndarray: ...


class _Dimension(NamedTuple):
    """A dimension of a checkpoint's tensor, and the letters that are flattened into it."""

    letters: str
    # Groups of letters whose entries are concatenated, inside of `letters`.
    alternatives: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tensor:
    """A row of a weight table: a tensor of the checkpoint, or a part of one, and its parameter."""

    name: str
    # Place of the parameter in the pytree. "q", "gate" and the like name their part of a fused
    # parameter (models/fused.py).
    path: ParamPath
    # Dimensions of the tensor as letters. A dimension that flattens several letters is in
    # parentheses, "(KGH)D" for a q_proj weight; concatenated parts are in brackets,
    # "([KGH|KH|KH])D" for a fused qkv.
    axes: str
    part: int = 0  # index of the row's part in the brackets
    expert: int | None = None  # index of the expert, where each has its own tensor
    # Part of a head's dimensions that the row fills, as of models/fused.py; empty where the tensor
    # has them in the parameter's order.
    head: str = ""
    # For the scales of a quantized weight: the letter in place of those summed over, and the number
    # of scales along it.
    scales: tuple[str, int] | None = None
    # Other axes that checkpoints have the tensor in, told apart by its shape; empty for none.
    other_axes: str = ""

    @property
    def block(self) -> str:
        """Nested block of the layer that has the parameter ("experts", "shared"), or ""."""
        return str(self.path[2]) if len(self.path) > 3 else ""

    def sizes(self, spec: ModelSpec) -> dict[str, int]:
        """Return the size of every dimension that the tensor can have, by letter."""
        sizes = spec.sizes(self.block)
        if self.scales:
            letter, size = self.scales
            sizes[letter] = size
        return sizes

    def fused_slices(self, sizes: Mapping[str, int]) -> dict[str, tuple[str, slice]]:
        """Map each axis along which the parameter holds several tensors to this tensor's share.

        The share is the tensor's own letters there (none for a single entry), and the entries of
        the parameter that it fills.
        """
        name = str(self.path[-1])
        fused = fused_slice(name, sizes) if name in PARTS else {}
        if self.head:
            fused |= head_slice(self.head, sizes)
        if self.expert is not None:
            fused["E"] = ("", slice(self.expert, self.expert + 1))
        return fused

    def size(self, axes: str, sizes: Mapping[str, int]) -> int:
        """Return how many numbers of a parameter with these axes the tensor fills."""
        fused = self.fused_slices(sizes)
        lengths = (
            fused[letter][1].stop - fused[letter][1].start if letter in fused else sizes[letter]
            for letter in axes
        )
        return prod(lengths)

    def as_stored(self, shape: Sequence[int], sizes: Mapping[str, int]) -> "Tensor":
        """Return the row with the axes that a tensor of this shape has.

        ModelError when both fit: the numbers could be read in the wrong order. A shape that neither
        fits is refused by `read`.
        """
        if not self.other_axes:
            return self
        other = replace(self, axes=self.other_axes, other_axes="")
        if other.shape(sizes) != list(shape):
            return self
        if self.shape(sizes) == list(shape):
            raise ModelError(
                f"tensor {self.name} of shape {list(shape)} may have the order {self.axes} or "
                f"{self.other_axes}; sizes that are equal do not tell them apart"
            )
        return other

    def shape(self, sizes: Mapping[str, int]) -> list[int]:
        """Return the shape of the whole tensor in the checkpoint."""
        return [_size(dimension, sizes) for dimension in _dimensions(self.axes)]

    def read(
        self, stored: Stored, sizes: Mapping[str, int], wanted: str, within: Within
    ) -> np.ndarray:
        """Read the tensor with its dimensions in the order `wanted`.

        Letters in parentheses are flattened. Of letters in `within` only those entries are read.
        The result is a view of `stored` where that is possible. ModelError when the tensor's shape
        does not follow from config.json.
        """
        dimensions = list(_dimensions(self.axes))
        shape = self.shape(sizes)
        if list(stored.shape) != shape:
            raise ModelError(
                f"tensor {self.name} has shape {list(stored.shape)}; config.json makes it "
                f"{shape} ({self.axes})"
            )
        cuts = [
            _cut(dimension, size, self.part, sizes, within)
            for dimension, size in zip(dimensions, shape, strict=True)
        ]
        # Every step cuts what the step before could not: the stored dimensions, the concatenated
        # parts, then single letters.
        part = stored[tuple(cut.index for cut in cuts)]
        part = part.reshape([size for cut in cuts for size in cut.split])
        part = part[tuple(piece for cut in cuts for piece in cut.part)]
        part = part.reshape([size for cut in cuts for size in cut.sizes])
        part = part[tuple(piece for cut in cuts for piece in cut.rest)]
        letters = "".join(cut.letters for cut in cuts)
        groups = list(groups_of(wanted))
        part = part.transpose([letters.index(letter) for letter in "".join(groups)])
        lengths = iter(part.shape)
        return part.reshape([prod(next(lengths) for _ in group) for group in groups])


class _Cut(NamedTuple):
    """How one dimension of a checkpoint's tensor is read; the fields are in the order of use."""

    index: slice  # of the stored dimension
    split: list[int]  # sizes of its letters, all alternatives as one dimension
    part: list[slice]  # the wanted alternative
    sizes: list[int]  # sizes of all letters
    rest: list[slice]  # entries of the letters that `index` does not cut
    letters: str


def _cut(
    dimension: _Dimension, size: int, part: int, sizes: Mapping[str, int], within: Within
) -> _Cut:
    everything = slice(None)
    letters = dimension.letters
    outer = [sizes[letter] for letter in letters]
    inner = list[int]()
    index = everything
    # The outermost letter is cut in the stored dimension, so that the rest is never read.
    if outer and letters[0] in within:
        wanted = within[letters[0]]
        stride = size // outer[0]
        index = slice(wanted.start * stride, wanted.stop * stride)
        outer[0] = wanted.stop - wanted.start
    split = list(outer)
    cut = [everything] * len(outer)
    if dimension.alternatives:
        own = dimension.alternatives[part]
        inner = [sizes[letter] for letter in own]
        lengths = [prod(sizes[letter] for letter in each) for each in dimension.alternatives]
        begin = sum(lengths[:part])
        if outer:
            split.append(sum(lengths))
            cut.append(slice(begin, begin + lengths[part]))
        else:  # then the alternatives themselves are cut in the stored dimension
            wanted = within.get(own[:1], slice(0, inner[0] if inner else 1))
            stride = lengths[part] // inner[0] if inner else 1
            index = slice(begin + wanted.start * stride, begin + wanted.stop * stride)
            if inner:
                inner[0] = wanted.stop - wanted.start
            split.append(prod(inner))
            cut.append(everything)
        letters += own
    rest = [within.get(letter, everything) for letter in letters]
    if rest:
        rest[0] = everything
    return _Cut(index, split, cut, outer + inner, rest, letters)


def _size(dimension: _Dimension, sizes: Mapping[str, int]) -> int:
    size = prod(sizes[letter] for letter in dimension.letters)
    if dimension.alternatives:
        size *= sum(prod(sizes[letter] for letter in own) for own in dimension.alternatives)
    return size


def _dimensions(axes: str) -> Iterator[_Dimension]:
    """Parse axes: "(N[U|IJ])D" yields N with the alternatives U and IJ, then D."""
    for group in groups_of(axes):
        letters, _, alternatives = group.removesuffix("]").partition("[")
        yield _Dimension(letters, tuple(alternatives.split("|")) if alternatives else ())


def groups_of(axes: str) -> Iterator[str]:
    """Split axes into dimensions at parentheses: "(NH)D" yields "NH", then "D"."""
    while axes:
        if axes[0] == "(":
            group, axes = axes[1:].split(")", 1)
            yield group
        else:
            yield axes[0]
            axes = axes[1:]


def by_parameter(table: Sequence[Tensor]) -> dict[ParamPath, list[Tensor]]:
    """Group the rows of a weight table by the path of the parameter that they fill.

    Rows that are parts of one fused parameter, such as q, k and v of qkv, share a group.
    """
    grouped: dict[ParamPath, list[Tensor]] = {}
    for row in table:
        path = row.path
        fused = PARTS.get(str(path[-1]))
        if fused:
            path = (*path[:-1], fused.fused)
        grouped.setdefault(path, []).append(row)
    return grouped


@dataclass(frozen=True)
class Family:
    """A model family."""

    spec_from_hf: Callable[[Mapping[str, Any]], ModelSpec]  # reads config.json
    tensors: Callable[[ModelSpec], list[Tensor]]  # weight table of a spec
    # Patterns, as of fnmatch, of the names of tensors that checkpoints have and inference does not
    # need.
    ignored: Callable[[ModelSpec], tuple[str, ...]] = lambda spec: ()
    # Names of blocks of tensors for other input than text, which are left out.
    towers: tuple[str, ...] = ()
    # Weight tables of checkpoints that have other names for tensors of the same model.
    other_tensors: tuple[Callable[[ModelSpec], list[Tensor]], ...] = ()


def without_frequencies(spec: ModelSpec) -> tuple[str, ...]:
    """Ignore the rope's inverse frequencies, which old checkpoints store in every layer."""
    return ("*rotary_emb.inv_freq",)
