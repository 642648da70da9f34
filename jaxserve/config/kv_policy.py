"""Policies of the KV cache: which tokens the layers of a group keep, and in what.

Tokens are kept in entries of a sequence's table. An entry is a page of page_size tokens or, in a
group of slots, one slot for the whole sequence. A table counts entries from the sequence's first
token on; NO_PAGE stands for those that are not kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

NO_PAGE: Final = -1  # in a table of pages: a page that was given back, since no query sees it
UNBOUNDED_TOKENS: Final = 2**50  # more tokens than a sequence can have


@dataclass(frozen=True)
class KVPolicy:
    """Policy of one group of layers: what they keep of a sequence."""

    page_size: int  # tokens of a table's entry
    # True if entries come back while a sequence is running; otherwise, it keeps all it was given.
    slides: ClassVar[bool] = False

    def span(self, tokens: int) -> int:
        """Return the number of entries that positions 0 to `tokens` - 1 lie in."""
        return -(-tokens // self.page_size)

    def held(self, tokens: int) -> int:
        """Return the most entries that a sequence of `tokens` tokens holds at a time."""
        return self.span(tokens)

    def first_seen(self, position: int) -> int:
        """Return the first position that the token at `position` attends to."""
        return 0

    def first_needed(self, position: int) -> int:
        """Return the index of the first entry that the token at `position` attends to."""
        return self.first_seen(position) // self.page_size

    def first_needed_before(self, page: int) -> int:
        """Return the first page of a prompt that has to be here before `page` is of use."""
        return 0

    def covered(self, found: Sequence[int], limit: int) -> int:
        """Return the longest prefix, in pages, up to `limit`, behind which a sequence could go on.

        `found` has the prefix cache's page for each page of the prompt, NO_PAGE where it has none.
        """
        raise NotImplementedError

    def release(self, table: Sequence[int], settled: int) -> range:
        """Return the indices of held entries that no query at `settled` or behind it sees."""
        return range(0)

    def longest(self, entries: int, max_context: int) -> int:
        """Return the tokens of the longest sequence that a pool of `entries` entries has room for.

        max_context where the number of tokens makes no difference.
        """
        return entries * self.page_size


@dataclass(frozen=True)
class FullPages(KVPolicy):
    """Every page of a sequence, since every token attends to all before it."""

    def covered(self, found: Sequence[int], limit: int) -> int:
        """Return the number of pages before the first that is missing."""
        prefix = found[:limit]
        return prefix.index(NO_PAGE) if NO_PAGE in prefix else limit


@dataclass(frozen=True)
class SlidingPages(KVPolicy):
    """The pages of a sliding window: those that a query still attends to."""

    window: int  # tokens that a query sees, including its own
    in_flight: int  # most tokens of a sequence that are planned and not committed yet
    slides: ClassVar[bool] = True

    @property
    def window_pages(self) -> int:
        """Return the most pages that a sequence of any length holds at a time."""
        # One page more, because windows do not begin at page borders.
        return self.span(self.window + self.in_flight) + 1

    def held(self, tokens: int) -> int:
        """Return the most pages that a sequence of `tokens` tokens holds at a time."""
        return min(self.span(tokens), self.window_pages)

    def first_seen(self, position: int) -> int:
        """Return the first position in the window of the token at `position`."""
        return max(0, position - self.window + 1)

    def first_needed_before(self, page: int) -> int:
        """Return the page itself: others send a window from its first page on."""
        return page

    def covered(self, found: Sequence[int], limit: int) -> int:
        """Return the longest prefix whose pages in the window of the next token are all found."""
        length = limit
        while length > 0:
            first = self.first_needed(length * self.page_size)
            seen = found[first:length]
            if NO_PAGE not in seen:
                break
            # Shorter prefixes see the last missing page too, down to the one that ends before it.
            length = first + max(i for i, page in enumerate(seen) if page == NO_PAGE)
        return length

    def release(self, table: Sequence[int], settled: int) -> range:
        """Return the indices of held pages that the window has passed.

        No step that is in flight or still to come begins before `settled`.
        """
        end = self.first_needed(settled)
        begin = end
        while begin > 0 and table[begin - 1] != NO_PAGE:
            begin -= 1
        return range(begin, end)

    def longest(self, entries: int, max_context: int) -> int:
        """Return max_context if the window can slide: pages behind it come back."""
        return max_context if entries >= self.window_pages else entries * self.page_size


@dataclass(frozen=True)
class SequenceSlot(KVPolicy):
    """One slot for each sequence, however long it is: a state that every token updates.

    The slot holds the state behind the newest token, and none of those before it. So a prefix is
    never found in it (`covered` is always 0, until there are snapshots), and a group of slots
    keeps every other group of its model from hits. A preempted sequence gives its slot back and is
    computed again from its first token, at which the device begins with an empty state. A rejected
    draft cannot be taken out of the state, so nothing is drafted for models that have slots.
    """

    page_size: int = UNBOUNDED_TOKENS

    def covered(self, found: Sequence[int], limit: int) -> int:
        """Return 0: the state behind a prefix is not kept."""
        return 0

    def longest(self, entries: int, max_context: int) -> int:
        """Return max_context: a slot holds any number of tokens."""
        return max_context
