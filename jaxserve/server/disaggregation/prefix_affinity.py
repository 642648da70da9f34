"""Guess which prompts a prefill server has in its prefix cache, from those it was given lately."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

Blocks = tuple[int, ...]  # of a prompt, see blocks_of
BLOCK = 256  # tokens
MAX_BLOCKS = 2**14  # remembered of one server: 4 M tokens


class PrefixAffinity:
    """Remembers the blocks that this decode server sent to one prefill server.

    This is a guess: other decode servers may have sent more, and the prefill server may have
    evicted some.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def add(self, blocks: Blocks) -> None:
        """Remember the blocks of a prompt that the server has computed."""
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def cached(self, blocks: Blocks) -> int:
        """Return how many tokens at a prompt's beginning the server is likely to have cached."""
        known = list(takewhile(lambda block: block in self._blocks, blocks))
        return len(known) * BLOCK


def blocks_of(prompt: Sequence[int], salt: str) -> Blocks:
    """Return one hash for each whole block of the prompt, over everything up to its end."""
    # Each hash covers the one before, so that equal blocks behind different beginnings differ.
    chained = hash(salt)
    found = []
    for begin in range(0, len(prompt) - BLOCK + 1, BLOCK):
        chained = hash((chained, tuple(prompt[begin : begin + BLOCK])))
        found.append(chained)
    return tuple(found)
