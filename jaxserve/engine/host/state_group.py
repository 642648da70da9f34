"""StateGroup: slots of layers that keep states of sequences, in one lane, and their snapshots."""

from collections.abc import Iterable

from jaxserve.config.kv_policy import NO_PAGE, StateSlots
from jaxserve.engine.host.kv_group import KVGroup, kept
from jaxserve.engine.host.prefix_cache import DigestChain


class StateGroup(KVGroup):
    """Pool and prefix cache of a group of slots, and what becomes of a sequence's table.

    Of a table's entries, all but the last are the states behind whole pages. A sequence goes on in
    the slot that it ends with, or in another one where that is kept. It has to take another one if
    it has none yet, or if others hold that too: it then *lacks* a slot. There are always as many
    slots available as free rows and running sequences lack, so that none ever waits for one.

    Where tokens are drafted, a table reaches as far as the sequence does if all are accepted. Until
    they are, the sequence goes on in an entry before the last.

    Args:
        rows: Rows of the lane.
    """

    def __init__(self, policy: StateSlots, num_slots: int, rows: int):
        super().__init__(policy, num_slots)
        self.states = policy
        # Slots that may hold states of unfinished answers, which nobody finds yet.
        self._most_unfinished = (num_slots - rows + 1) // 2

    def lacks(self, table: list[int]) -> bool:
        """Return whether a sequence cannot go on in the slot that its table ends with."""
        return not table or self.pool.holders(table[-1]) > 1

    def lacking(self, table: list[int], tokens: int) -> int:
        """Return 1 if a sequence needs a slot for its next `tokens` positions, else 0."""
        return int(self.policy.span(tokens) > len(table) and self.lacks(table))

    def fits_beside(self, hit: list[int], free_rows: int, tables: Iterable[list[int]]) -> bool:
        """Return whether a sequence may enter with the snapshot of `hit`.

        Slots are left for all that lack one then, the sequence and those it shares the slot with.

        Args:
            free_rows: Free rows, that of the sequence included.
            tables: Tables of the running sequences.
        """
        held = kept(hit)
        # A snapshot that nobody else holds may be written over.
        lacking = int(not held or not self.pool.idle_among(held))
        for table in tables:
            lacking += self.lacks(table) or (bool(held) and table[-1] == held[-1])
        available = self.pool.available - self.pool.idle_among(held)
        return lacking + free_rows - 1 <= available

    def go_on(
        self, table: list[int], tokens: int, keep: bool, owed: int, prompt_len: int
    ) -> list[tuple[int, int]]:
        """Give a table the entry that its next chunk ends in; return index and slot of new entries.

        Entries that the chunk passes name the same slot on the device as the next one, in which
        their states come in turn, unless they are snapshots.

        Args:
            keep: Whether the state behind the page that the table ends with is to be kept.
            owed: Slots that free rows and other sequences lack.
            prompt_len: Tokens of the prompt that may leave snapshots on the way; 0 for none.
        """
        new = range(len(table), self.policy.span(tokens))
        if not new:
            return []
        if self.lacks(table) or (self._keeps(table[-1], keep) and self.pool.available > owed):
            (slot,) = self.pool.allocate(1)
        else:
            slot = table[-1]
            self.cache.withdraw(slot)
            table[-1] = NO_PAGE
        fresh = []
        snapshots = self._passed_snapshots(new, prompt_len)
        for i in new:
            fresh.append((i, slot))
            if i in snapshots and self.pool.available > owed:
                table.append(slot)
                (slot,) = self.pool.allocate(1)
            else:
                table.append(slot if i == new[-1] else NO_PAGE)
        return fresh

    def _passed_snapshots(self, new: range, prompt_len: int) -> set[int]:
        """Return which of a table's new entries, but the last, are snapshots.

        Of those on the way of a long prompt there is one in a chunk, the last: more would drive out
        those of others, before the first comes back.
        """
        ends = {i: (i + 1) * self.policy.page_size for i in new[:-1]}
        found = [i for i, end in ends.items() if self.states.is_findable(end, prompt_len)]
        of_end = {i for i in found if self.states.ends_prompt(ends[i], prompt_len)}
        on_way = [i for i in found if i not in of_end]
        return of_end | set(on_way[-1:])

    def _keeps(self, slot: int, keep: bool) -> bool:
        return keep or self.cache.has(slot)

    def may_keep_unfinished(self, running: int) -> bool:
        """Return whether one more state of an unfinished answer may be kept.

        Args:
            running: Number of running sequences.
        """
        held = self.pool.num_pages - self.pool.available
        return held - running < self._most_unfinished

    def leave_behind(self, table: list[int], settled: int, prompt_len: int) -> None:
        """Take back the states that a sequence does not go on from; snapshots stay findable."""
        for i in self.policy.release(table, settled):
            end = (i + 1) * self.policy.page_size
            # Snapshots on the way of one long prompt must not drive out those of others.
            passed = not self.states.ends_prompt(end, prompt_len)
            self.pool.release([table[i]], passed=passed)
            table[i] = NO_PAGE

    def publish_last(
        self, chain: DigestChain, tokens: list[int], table: list[int], settled: int
    ) -> None:
        """Make the state behind the last whole page findable, if the sequence has it.

        Args:
            chain: Digests of the sequence's tokens up to that page.
        """
        index = settled // self.policy.page_size - 1
        if 0 <= index < len(table) and table[index] != NO_PAGE:
            self.publish_entry(chain, tokens, table, index)
