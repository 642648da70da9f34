"""Lane: an index of the mesh's data and expert axes, with its pages, prefix caches and rows."""

from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from jaxserve.config import EngineConfig
from jaxserve.config.kv_policy import NO_PAGE, KVPolicy, StateSlots
from jaxserve.engine.host.kv_group import KVGroup
from jaxserve.engine.host.page_pool import PagePool
from jaxserve.engine.host.prefix_cache import DigestChain
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.host.shared_prefixes import SharedPrefixes
from jaxserve.engine.host.state_group import StateGroup
from jaxserve.errors import EngineError

FreshPage = tuple[int, int, int, int]  # group, row, index in the row's table, page or slot


class Lane:
    """Rows and pages of one lane. A running sequence stays in its lane; page ids are local to it.

    What each page group keeps of a sequence is up to its policy (config.kv_policy). In a sequence's
    table NO_PAGE stands for pages that the group does not keep.
    """

    def __init__(self, index: int, config: EngineConfig, fingerprint: str):
        self.index = index
        self.groups = [
            _group_of(policy, pool.pages, config.max_batch)
            for policy, pool in zip(config.policies, config.pools, strict=True)
        ]
        self.caches = [group.cache for group in self.groups]
        self.prefixes = SharedPrefixes(config, self.groups, fingerprint)
        self.running: list[Sequence] = []  # sequences with a row, in order of service
        # The sequence that lacked pages in the step before: it goes first, and none is admitted.
        self.blocked: Sequence | None = None
        self._config = config
        self._sliding = [i for i, group in enumerate(self.groups) if group.policy.slides]
        self._states = {i: g for i, g in enumerate(self.groups) if isinstance(g, StateGroup)}
        self._kept = [
            i for i in range(len(self.groups)) if i not in self._states and i not in self._sliding
        ]
        # Pages of the full group that the draft model has filled as well.
        self._filled_by_drafter: set[int] = set()
        self._free_rows = list(range(config.max_batch))  # ascending, and so a heap

    @property
    def has_row(self) -> bool:
        """Return whether a row is free."""
        return bool(self._free_rows)

    @property
    def draining(self) -> bool:
        """Return whether pages come back with the step in flight."""
        return any(seq.leaving for seq in self.running)

    @property
    def slides(self) -> bool:
        """Return whether pages come back while their sequence is running."""
        return bool(self._sliding)

    def available_pages(self) -> int:
        """Return the pages that could be taken now, of the page group that has fewest."""
        return min(pool.available for pool in self.page_pools or self.slot_pools)

    @property
    def page_pools(self) -> list[PagePool]:
        """Return the pools of the groups that keep pages."""
        return [group.pool for i, group in enumerate(self.groups) if i not in self._states]

    @property
    def slot_pools(self) -> list[PagePool]:
        """Return the pools of the groups that keep states."""
        return [group.pool for group in self._states.values()]

    # ---- Rows and pages of sequences

    def hit(self, seq: Sequence) -> list[list[int]]:
        """Return the cached pages per group that a waiting sequence would share, see `enter`."""
        return self.prefixes.hit(seq)

    def fits(self, seq: Sequence, hit: list[list[int]], tokens: int) -> bool:
        """Return whether a sequence that gets `hit` finds pages for `tokens` positions."""
        if not all(self._group_fits(i, pages, tokens) for i, pages in enumerate(hit)):
            return False
        if not self._config.deterministic:
            return True
        # Pages that come back are not taken at admission, but every running sequence has to be sure
        # of the most that it may hold.
        lengths = [tokens, *(s.limit for s in self.running)]
        sliding = [self.groups[i] for i in self._sliding]
        return all(sum(map(g.policy.held, lengths)) <= g.pool.num_pages for g in sliding)

    def _group_fits(self, index: int, hit: list[int], tokens: int) -> bool:
        if index not in self._states:
            return self.groups[index].fits(hit, tokens)
        tables = [seq.pages[index] for seq in self.running]
        return self._states[index].fits_beside(hit, len(self._free_rows), tables)

    def enter(self, seq: Sequence, hit: list[list[int]]) -> None:
        """Give the sequence a row and its cached prefix."""
        for group, pages in zip(self.groups, hit, strict=True):
            group.share(pages)
        seq.lane = self.index
        seq.row = heappop(self._free_rows)
        seq.pages = [list(pages) for pages in hit]
        seq.num_computed = seq.settled = len(hit[0]) * self._config.page_size
        self._count_room(seq)
        self.running.append(seq)
        self.running.sort(key=lambda s: s.rank)

    def extend(self, seq: Sequence, tokens: int) -> list[FreshPage] | None:
        """Give the sequence pages for `tokens` positions; return None if there are too few."""
        return [] if tokens <= seq.room else self._extend(seq, tokens, range(len(self.groups)))

    def must_extend(self, seq: Sequence, tokens: int) -> list[FreshPage]:
        """Give the sequence pages for `tokens` positions that the caller knows to be available."""
        fresh = self.extend(seq, tokens)
        if fresh is None:
            raise EngineError(
                f"sequence {seq.id} has no page for {tokens} tokens, and there should be one"
            )
        return fresh

    def reserve(self, seq: Sequence, tokens: int) -> None:
        """Give an admitted sequence all pages that it will keep, which `fits` found available."""
        if self._extend(seq, tokens, self._kept) is None:
            raise EngineError(
                f"sequence {seq.id} was admitted without the pages for {tokens} tokens"
            )

    def has_page_for_everyone(self, tokens: int = 1) -> bool:
        """Return whether every running sequence can have `tokens` more positions."""
        needy = [seq for seq in self.running if seq.num_computed + tokens > seq.room]
        return all(
            sum(group.lacking(seq.pages[i], seq.num_computed + tokens) for seq in needy)
            <= group.pool.available
            for i, group in enumerate(self.groups)
        )

    def _extend(self, seq: Sequence, tokens: int, groups: Iterable[int]) -> list[FreshPage] | None:
        need = {group: self.groups[group].lacking(seq.pages[group], tokens) for group in groups}
        if any(count > self.groups[group].pool.available for group, count in need.items()):
            return None
        fresh = []
        for group in need:
            new = self._extend_group(group, seq, tokens)
            self._note_overwritten(group, [page for _, page in new])
            fresh += [(group, seq.row, index, page) for index, page in new]
        self._count_room(seq)
        return fresh

    def _extend_group(self, index: int, seq: Sequence, tokens: int) -> list[tuple[int, int]]:
        table = seq.pages[index]
        if index not in self._states:
            return self.groups[index].extend(table, tokens)
        group = self._states[index]
        others = (each.pages[index] for each in self.running if each is not seq)
        owed = len(self._free_rows) + sum(map(group.lacks, others))
        # A deterministic engine shares nothing of a prompt that it scores.
        shares_prompt = not (self._config.deterministic and seq.scores_prompt)
        prompt_len = seq.prompt_len if shares_prompt else 0
        keep = self._keeps_state(seq, group, len(table) * self._config.page_size, prompt_len)
        return group.go_on(table, tokens, keep, owed, prompt_len)

    def _keeps_state(self, seq: Sequence, group: StateGroup, border: int, prompt_len: int) -> bool:
        """Return whether the state behind the first `border` tokens, whole pages, is to be kept.

        The chunk or the decode that passes the end of a page leaves its state there, so that any
        number of decodes may be launched together.
        """
        if group.states.is_findable(border, prompt_len):
            return True
        is_unfinished = seq.decoding and group.states.keeps_last
        return is_unfinished and group.may_keep_unfinished(len(self.running))

    def _count_room(self, seq: Sequence) -> None:
        tables = zip(self.groups, seq.pages, strict=True)
        seq.room = min(group.policy.page_size * len(pages) for group, pages in tables)

    def leave(self, seq: Sequence) -> None:
        """Take row and pages back; no step in flight may refer to them any more."""
        if seq.in_flight:
            raise EngineError(
                f"sequence {seq.id} leaves its row with {seq.in_flight} steps in flight"
            )
        if seq.draft_computed:
            self.note_drafted(seq, seq.draft_computed)
        self.prefixes.publish_last_states(seq)
        for group, pages in zip(self.groups, seq.pages, strict=True):
            group.give_back(pages)
        heappush(self._free_rows, seq.row)
        self.running.remove(seq)
        seq.lane = seq.row = -1
        seq.pages = []
        seq.num_computed = seq.draft_computed = seq.settled = seq.room = 0
        seq.newest_on_device = seq.waits_for_host = False
        for chain in seq.chains:
            chain.published = 0

    # ---- Publishing pages

    def settle(self, seq: Sequence, position: int) -> None:
        """Note that the tokens before `position` are in pages for good.

        Full pages can then be found by others, and pages that no query sees any more come back.
        """
        page_size = self._config.page_size
        filled = seq.settled // page_size < position // page_size
        seq.settled = position
        if filled:
            self.prefixes.publish(seq)
        for i in self._sliding:
            self.groups[i].slide(seq.pages[i], position)
        if filled:
            for i, group in self._states.items():
                group.leave_behind(seq.pages[i], position, seq.prompt_len)

    def adopt(
        self,
        group: int,
        tokens: list[int],
        chain: DigestChain,
        pages: range,
        write: Callable[[list[int]], None],
    ) -> int:
        """Publish pages of a chain that another engine computed, see KVGroup.adopt."""

        def fill(taken: list[int]) -> None:
            self._note_overwritten(group, taken)
            write(taken)

        return self.groups[group].adopt(tokens, chain, pages, fill)

    # ---- Pages of the draft model, which uses the tables of the first full group

    def note_drafted(self, seq: Sequence, position: int) -> None:
        """Note that the draft model has the tokens before `position` in pages for good."""
        pages = seq.pages[self._config.full_group]
        self._filled_by_drafter.update(pages[: position // self._config.page_size])

    def skip_drafted(self, seq: Sequence) -> None:
        """Move `draft_computed` past shared pages that the draft model has filled already."""
        pages = seq.pages[self._config.full_group]
        size = self._config.page_size
        index = seq.draft_computed // size
        while (index + 1) * size <= seq.num_known and pages[index] in self._filled_by_drafter:
            index += 1
            seq.draft_computed = index * size

    def _note_overwritten(self, group: int, pages: list[int]) -> None:
        """Forget that the draft model had filled pages that get new content."""
        if self._filled_by_drafter and group == self._config.full_group:
            self._filled_by_drafter.difference_update(pages)

    def check_invariants(self) -> None:
        """Raise EngineError unless rows and pages are each free or taken once."""
        rows = [seq.row for seq in self.running] + self._free_rows
        if sorted(rows) != list(range(self._config.max_batch)):
            raise EngineError(
                f"lane {self.index}: rows {sorted(rows)} are not each free or taken once"
            )
        for group, cache in enumerate(self.caches):
            held = ([page for page in seq.pages[group] if page != NO_PAGE] for seq in self.running)
            cache.pool.check_invariants(held)


def _group_of(policy: KVPolicy, num_entries: int, rows: int) -> KVGroup:
    """Return an empty group with this policy, in a lane with so many rows."""
    if isinstance(policy, StateSlots):
        return StateGroup(policy, num_entries, rows)
    return KVGroup(policy, num_entries)
