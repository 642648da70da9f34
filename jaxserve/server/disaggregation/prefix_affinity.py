"""Handed: which prompts a prefill server was given lately, and so is likely to have in its prefix
cache.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

Blocks = tuple[int, ...]  # of a prompt, see blocks_of
BLOCK = 256  # tokens
MOST_BLOCKS = 2**14  # remembered of one server: 4 M tokens


class Handed:
    """Only a guess, by what one decode server gave it: others may have given it more, and it may
    have evicted some.
    """

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self._most = most
        self._blocks: OrderedDict[int, None] = OrderedDict()  # the oldest first

    def add(self, blocks: Blocks) -> None:
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def cached(self, blocks: Blocks) -> int:
        """Tokens of a prompt that it had before, from the first on."""
        found = 0
        for block in blocks:
            if block not in self._blocks:
                break
            found += BLOCK
        return found


def blocks_of(prompt: Sequence[int], salt: str) -> Blocks:
    """One number for the prompt up to each of its whole blocks."""
    return tuple(_chain(prompt, salt))


def _chain(prompt: Sequence[int], salt: str) -> Iterator[int]:
    chain = hash(salt)
    for begin in range(0, len(prompt) - BLOCK + 1, BLOCK):
        chain = hash((chain, tuple(prompt[begin : begin + BLOCK])))
        yield chain
