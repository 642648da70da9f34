"""Quantizes weights shard by shard while they are read.

A number is rounded to the nearest one of the scheme, after division by its scale; the scale maps
the largest absolute number that shares it to the scheme's largest number.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from jaxserve.models.quant import Quantized, contracted

MAX_NUMBERS: Final = 2**24  # numbers of a weight that are in memory as float32 at a time

Ranges = tuple[range, ...]  # the entries that are asked for, along each dimension


def grouped(weight: Any, at: slice, groups: int) -> Any:
    """Reshape dimensions `at` of a NumPy or jax array to two: groups, numbers of a group."""
    return weight.reshape(*weight.shape[: at.start], groups, -1, *weight.shape[at.stop :])


def find_scales(weight: np.ndarray, at: slice, groups: int, largest: float) -> np.ndarray:
    """Return the scales of a float32 weight that is summed over dimensions `at`.

    The weight must have all numbers that share a scale. A scale is 1 where they are all zero.
    """
    scales = np.abs(grouped(weight, at, groups)).max(axis=at.start + 1) / np.float32(largest)
    return np.where(scales < np.finfo(np.float32).tiny, np.float32(1), scales)


def round_to(dtype: np.dtype, weight: np.ndarray, at: slice, scales: np.ndarray) -> np.ndarray:
    """Divide a float32 weight by its scales and round to the nearest numbers of the dtype."""
    numbers = grouped(weight, at, scales.shape[at.start]) / np.expand_dims(scales, at.start + 1)
    if jnp.issubdtype(dtype, jnp.integer):
        np.rint(numbers, out=numbers)
    return numbers.astype(dtype).reshape(weight.shape)


class ShardQuantizer:
    """Quantizes one weight shard by shard, reading it in parts of bounded size.

    A shard that has only some of the numbers that are summed over (N of an `o`, F of a `down`)
    still gets the scales of the whole sum, for which all of it is read. Shards are therefore bit
    for bit the parts of what one device would hold. Scales are computed once and shared.

    Args:
        read: Function that returns float32 numbers of the given ranges of the weight.
    """

    def __init__(self, name: str, param: Quantized, read: Callable[[Ranges], np.ndarray]):
        self._param = param
        self._read = read
        self._at = contracted(name, param.values.axes)
        self.scales = cache(self._scales)

    def values(self, asked: Ranges) -> np.ndarray:
        """Return the quantized numbers of these ranges of the weight."""
        at = self._at
        inner = self._inner
        scheme = self._param.scheme
        summed = asked[at.start]
        groups = range(1)
        if scheme.group:
            first = summed.start * inner // scheme.group
            groups = range(first, summed.stop * inner // scheme.group)
        scales = self.scales((*asked[: at.start], groups, *asked[at.stop :]))
        numbers = np.empty(_lengths(asked), scheme.dtype)
        for part, place in _parts(asked, at):
            shared = (*place[: at.start], slice(None), *place[at.stop :])
            numbers[place] = round_to(scheme.dtype, self._read(part), at, scales[shared])
        return numbers

    def _scales(self, asked: Ranges) -> np.ndarray:
        """Return the float32 scales of these ranges of the scales."""
        at = self._at
        inner = self._inner
        scheme = self._param.scheme
        groups = asked[at.start]
        summed = [range(size) for size in self._param.values.shape[at]]
        if scheme.group:
            first = groups.start * scheme.group // inner
            summed[0] = range(first, groups.stop * scheme.group // inner)
        found = np.empty(_lengths(asked), np.float32)
        for part, place in _parts((*asked[: at.start], *summed, *asked[at.start + 1 :]), at):
            shared = (*place[: at.start], slice(None), *place[at.stop :])
            found[shared] = find_scales(self._read(part), at, len(groups), scheme.largest)
        return found

    @property
    def _inner(self) -> int:
        """Numbers that are summed over for each entry of the first dimension that is."""
        return math.prod(self._param.values.shape[self._at][1:])


def _lengths(ranges: Ranges) -> list[int]:
    return [len(part) for part in ranges]


def _parts(asked: Ranges, at: slice, first: int = 0) -> Iterator[tuple[Ranges, tuple[slice, ...]]]:
    """Cut ranges into parts of at most MAX_NUMBERS, along dimensions that are not summed over.

    Yields each part with its place in the whole. Cutting starts at the outermost dimension from
    `first` on, so that a part belongs to one expert or few: each expert may have tensors of its
    own.
    """
    size = math.prod(_lengths(asked))
    if size <= MAX_NUMBERS or first == len(asked):
        yield asked, (slice(None),) * len(asked)
    elif at.start <= first < at.stop:
        yield from _parts(asked, at, first + 1)
    else:
        step = max(MAX_NUMBERS * len(asked[first]) // size, 1)
        for begin in range(0, len(asked[first]), step):
            here = slice(begin, begin + step)
            smaller = (*asked[:first], asked[first][here], *asked[first + 1 :])
            for part, place in _parts(smaller, at, first + 1):
                yield part, (*place[:first], here, *place[first + 1 :])
