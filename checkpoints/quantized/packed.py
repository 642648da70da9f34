"""Small integers packed in 32-bit words, as AWQ, GPTQ and compressed-tensors store them."""

import math
from dataclasses import dataclass

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError

WORD = 32


@dataclass(frozen=True, eq=False)
class Packed:
    """Unsigned integers [R, C] of `bits` bits that are packed in int32 words along `axis`.

    The first number is in a word's lowest bits; numbers of three bits may begin in one word and end
    in the next. Indexing with two slices unpacks the words that they touch and gives uint8.
    """

    words: np.ndarray  # int32 [R, C] with size * bits / 32 words, rounded up, along the axis
    bits: int
    axis: int
    size: int
    order: tuple[int, ...] | None = None  # place in a word of each of its numbers, if not in order
    offset: int = 0  # added to each number, modulo 2**bits

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(
            self.size if axis == self.axis else size for axis, size in enumerate(self.words.shape)
        )

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        part = range(self.size)[index[self.axis]]
        words = math.lcm(WORD, self.bits) // WORD  # smallest unit that holds whole numbers
        numbers = words * WORD // self.bits
        first = part.start // numbers
        end = -(-part.stop // numbers)
        begin = part.start - first * numbers
        cut = list[slice](index)
        cut[self.axis] = slice(first * words, end * words)
        unpacked = self._unpacked(self.words[tuple(cut)], words)
        cut = [slice(None), slice(None)]
        cut[self.axis] = slice(begin, begin + len(part))
        return unpacked[tuple(cut)]

    def _unpacked(self, words: np.ndarray, together: int) -> np.ndarray:
        """Unpack words; numbers are whole in every `together` of them."""
        before = math.prod(words.shape[: self.axis])
        count = words.shape[self.axis]
        after = words.shape[self.axis + 1 :]
        units = words.view(np.uint32).reshape(before, count // together, together, math.prod(after))
        if self.order is None:
            starts = np.arange(together * WORD // self.bits)
        else:
            starts = np.array(self.order)
        # The word in which each number begins, and its first bit there.
        low, shift = (
            each.astype(np.uint32)[:, None] for each in np.divmod(starts * self.bits, WORD)
        )
        codes = (units if together == 1 else units[:, :, low[:, 0]]) >> shift
        for number in np.flatnonzero(shift + self.bits > WORD):  # continued in the next word
            codes[:, :, number] |= units[:, :, low[number, 0] + 1] << (WORD - shift[number])
        codes = ((codes + np.uint32(self.offset)) & np.uint32(2**self.bits - 1)).astype(np.uint8)
        return codes.reshape(*words.shape[: self.axis], codes.shape[1] * codes.shape[2], *after)


def packed(
    name: str,
    words: np.ndarray,
    bits: int,
    axis: int,
    size: int,
    told_by: str = "",
    **layout: object,
) -> Packed:
    """Return a Packed; CheckpointError names a tensor of another dtype or number of words.

    Args:
        told_by: Name of another tensor that `size` follows from, for the error.
    """
    if words.dtype != np.int32 or words.ndim != 2:
        raise CheckpointError(
            f"tensor {name} is {words.dtype} {list(words.shape)}; numbers of {bits} bits are "
            f"packed in int32 matrices"
        )
    count = words.shape[axis]
    wanted = -(-size * bits // WORD)
    if count != wanted or (WORD % bits and count % bits):
        why = f", as {told_by} says" if told_by else ""
        raise CheckpointError(
            f"tensor {name} of shape {list(words.shape)} holds {count * WORD / bits:g} numbers "
            f"of {bits} bits along dimension {axis}; it must hold {size}{why}"
        )
    return Packed(words, bits, axis, size, **layout)  # pyright: ignore[reportArgumentType]
