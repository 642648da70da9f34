"""Policies of the KV cache: which tokens the layers of a group keep, and in what.

Tokens are kept in entries of a sequence's table, each of which stands for page_size tokens. An
entry is a page with these tokens or, in a group of slots, a slot with a state of the sequence. A
table counts entries from the sequence's first token on; NO_PAGE stands for those that are not kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

NO_PAGE: Final = -1  # in a table of pages: a page that was given back, since no query sees it


@dataclass(frozen=True)
class KVPolicy:
    """Policy of one group of layers: what they keep of a sequence."""

    page_size: int  # tokens of a table's entry
    # True if entries are to be given back after every step, not only when a page was filled.
    slides: ClassVar[bool] = False
    # True if a prefix is of no use to others without all entries that the policy keeps of it.
    needs_all: ClassVar[bool] = False

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

    def sent_from(self, pages: range) -> int:
        """Return the first position of what is sent of these pages to another engine."""
        return pages.start * self.page_size

    def covered(self, found: Sequence[int], limit: int) -> int:
        """Return the longest prefix, in pages, up to `limit`, behind which a sequence could go on.

        `found` has the prefix cache's page for each page of the prompt, NO_PAGE where it has none.
        """
        raise NotImplementedError

    def is_findable(self, end: int, prompt_len: int) -> bool:
        """Return whether others may find the entry that ends with position `end` - 1.

        Args:
            prompt_len: Tokens of the sequence's prompt.
        """
        return True

    def release(self, table: Sequence[int], settled: int) -> Sequence[int]:
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
    needs_all: ClassVar[bool] = True

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
class StateSlots(KVPolicy):
    """States of whole sequences, each in a slot: an entry is the state that a page ended with.

    A chunk reads the state behind the token before it and leaves that behind its last token in the
    entry of this one's page. Where it passes the end of a page whose entry names another slot than
    the next one, it leaves the state there too. So a table has entries only where states are kept,
    and a sequence goes on from its last one alone. States behind a whole page that others may go on
    from are snapshots; a prefix is found in the snapshot of exactly its length.
    """

    # Tokens between the snapshots of a long prompt, a multiple of `unit`; 0: there are none.
    interval: int = 0
    unit: int = 1  # tokens; every snapshot ends at a multiple
    # A running sequence keeps the state behind its last whole page, which becomes a snapshot when
    # it ends.
    keeps_last: bool = False
    needs_all: ClassVar[bool] = True

    def held(self, tokens: int) -> int:
        """Return 1, the slot that a sequence cannot do without."""
        return 1

    def first_seen(self, position: int) -> int:
        """Return the position of the token before, behind which the state is read."""
        return max(0, position - 1)

    def first_needed_before(self, page: int) -> int:
        """Return the page itself: a state stands for all tokens before it."""
        return page

    def sent_from(self, pages: range) -> int:
        """Return the last position of the pages, behind which the state is that is sent."""
        return pages.stop * self.page_size - 1

    def covered(self, found: Sequence[int], limit: int) -> int:
        """Return the longest prefix that a snapshot ends with."""
        lengths = (length for length in range(limit, 0, -1) if found[length - 1] != NO_PAGE)
        return next(lengths, 0)

    def is_findable(self, end: int, prompt_len: int) -> bool:
        """Return whether the state behind `end` tokens of a prompt, whole pages, is a snapshot."""
        at_interval = self.interval and end % self.interval == 0 and end <= prompt_len
        return bool(at_interval) or self.ends_prompt(end, prompt_len)

    def ends_prompt(self, end: int, prompt_len: int) -> bool:
        """Return whether a prompt's last snapshot lies behind `end` tokens.

        There are two where the prompt is whole units: the same prompt needs the one that leaves a
        token to compute, a longer one goes on from the other.
        """
        lasts = (prompt_len // self.unit, (prompt_len - 1) // self.unit)
        return self.interval > 0 and end in (last * self.unit for last in lasts)

    def release(self, table: Sequence[int], settled: int) -> Sequence[int]:
        """Return the indices of held entries that neither a chunk nor a successor will read."""
        first = settled // self.page_size - 1 if self.keeps_last else self.first_needed(settled)
        return [i for i in range(min(first, len(table))) if table[i] != NO_PAGE]

    def longest(self, entries: int, max_context: int) -> int:
        """Return max_context: a slot holds any number of tokens."""
        return max_context
