"""Lane: one index of the mesh's data axis, with its own pages, prefix caches and rows."""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from jaxserve.config import EngineConfig, Pool
from jaxserve.engine.host.prefix_cache import DigestChain, PrefixCache, root_digest
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.plan import NO_PAGE
from jaxserve.errors import EngineError

FreshPage = tuple[int, int, int, int]  # page group, row, index in the row's table, page id


class Lane:
    """Rows and pages of one lane. A running sequence stays in its lane; page ids are local to it.

    A page group is either full, and keeps every page of a sequence, or slides a window, and keeps
    the pages that a query still attends to. In a sequence's table NO_PAGE stands for the others.
    """

    def __init__(self, index: int, config: EngineConfig, fingerprint: str):
        self.index = index
        self.caches = [
            PrefixCache(pool.pages, config.page_size) for pool in config.pools
        ]  # per page group
        self.running: list[Sequence] = []  # sequences with a row, in order of service
        # The sequence that lacked pages in the step before: it goes first, and none is admitted.
        self.blocked: Sequence | None = None
        self.has_windows = any(pool.window for pool in config.pools)
        self._config = config
        self._fingerprint = fingerprint
        # Pages of the full group that the draft model has filled as well.
        self._filled_by_drafter: set[int] = set()
        self._free_rows = list(range(config.max_batch))
        heapify(self._free_rows)

    @property
    def has_row(self) -> bool:
        """Return whether a row is free."""
        return bool(self._free_rows)

    @property
    def draining(self) -> bool:
        """Return whether pages come back with the step in flight.

        They are those of a sequence that has ended or was preempted.
        """
        return any(seq.preempted or seq.finish for seq in self.running)

    def available_pages(self) -> int:
        """Return the pages that could be taken now, of the page group that has fewest."""
        return min(cache.pool.available for cache in self.caches)

    # ---- Finding cached prefixes

    def hit(self, seq: Sequence) -> list[list[int]]:
        """Return the pages per group of the longest cached prefix of a waiting sequence.

        At least one token is left to compute, since its logits are needed. For a sliding-window
        group, NO_PAGE stands for pages that the next token does not attend to.
        """
        # Scoring a prompt takes the hidden states of all its tokens, which pages do not hold.
        if not self._config.prefix_cache or seq.scores_prompt:
            return [[] for _ in self.caches]
        full_pages = (len(seq.tokens) - 1) // self._config.page_size
        self.extend_chains(seq.chains, seq.tokens, seq.request.salt, full_pages)
        return self.cached(seq.tokens, seq.chains)

    def cached(self, tokens: list[int], chains: list[DigestChain]) -> list[list[int]]:
        """Return the pages per group of the longest cached prefix that leaves a token to compute.

        chains: digests of `tokens`, as far as the prefix may reach.
        """
        limit = (len(tokens) - 1) // self._config.page_size
        found = [
            cache.lookup(chain.digests[:limit], tokens)
            for cache, chain in zip(self.caches, chains, strict=True)
        ]
        # Deterministic chunks begin at fixed borders, so a prefix has to end at one.
        step = 1
        if self._config.deterministic:
            step = self._config.chunk_border // self._config.page_size
        longest = min(
            (_first_missing(pages) for pages in self._of_full_groups(found)), default=limit
        )
        lengths = range(longest // step * step, 0, -step)
        length = next((n for n in lengths if self._windows_covered(found, n)), 0)
        return [
            [NO_PAGE] * first + pages[first:length]
            for pages, first in zip(found, self._first_pages(length), strict=True)
        ]

    def _first_pages(self, pages: int) -> list[int]:
        """Return per group the first page that the token behind `pages` full pages attends to."""
        return [
            self._first_seen(pool, pages * self._config.page_size) for pool in self._config.pools
        ]

    def _first_seen(self, pool: Pool, position: int) -> int:
        """Return the index of the first page that the token at this position attends to."""
        return pool.first_seen(position) // self._config.page_size

    def _of_full_groups(self, found: list[list[int]]) -> list[list[int]]:
        return [
            pages
            for pool, pages in zip(self._config.pools, found, strict=True)
            if pool.window is None
        ]

    def _windows_covered(self, found: list[list[int]], length: int) -> bool:
        """Return whether all windows are cached that the token behind `length` pages sees."""
        return all(
            pool.window is None or NO_PAGE not in pages[first:length]
            for pool, pages, first in zip(
                self._config.pools, found, self._first_pages(length), strict=True
            )
        )

    # ---- Rows and pages of sequences

    def fits(self, seq: Sequence, hit: list[list[int]], tokens: int) -> bool:
        """Return whether a sequence that gets `hit` finds pages for `tokens` positions."""
        for pool, cache, pages in zip(self._config.pools, self.caches, hit, strict=True):
            held = [page for page in pages if page != NO_PAGE]
            need = self._config.pages_held(pool, tokens)
            # Idle pages of the hit count as available, and entering takes them out of that number.
            if need - len(held) > cache.pool.available - cache.pool.idle_among(held):
                return False
            if pool.window and self._config.deterministic:
                # Pages of windows are not taken at admission, but every running sequence has to be
                # sure of the most that it may hold.
                need += sum(self._config.pages_held(pool, s.limit) for s in self.running)
                if need > pool.pages:
                    return False
        return True

    def enter(self, seq: Sequence, hit: list[list[int]]) -> None:
        """Give the sequence a row and its cached prefix."""
        for cache, pages in zip(self.caches, hit, strict=True):
            cache.pool.share(page for page in pages if page != NO_PAGE)
        seq.lane = self.index
        seq.row = heappop(self._free_rows)
        seq.pages = [list(pages) for pages in hit]
        seq.num_computed = seq.settled = len(hit[0]) * self._config.page_size
        self._count_room(seq)
        self.running.append(seq)
        self.running.sort(key=lambda s: s.rank)

    def extend(self, seq: Sequence, tokens: int) -> list[FreshPage] | None:
        """Give the sequence pages for `tokens` positions; return None if there are too few."""
        return [] if tokens <= seq.room else self._extend(seq, tokens, range(len(self.caches)))

    def must_extend(self, seq: Sequence, tokens: int) -> list[FreshPage]:
        """Give the sequence pages for `tokens` positions that the caller knows to be available."""
        fresh = self.extend(seq, tokens)
        if fresh is None:
            raise EngineError(
                f"sequence {seq.id} has no page for {tokens} tokens, and there should be one"
            )
        return fresh

    def reserve(self, seq: Sequence, tokens: int) -> None:
        """Give an admitted sequence all its pages of full groups, which `fits` found available."""
        groups = [g for g, pool in enumerate(self._config.pools) if pool.window is None]
        if self._extend(seq, tokens, groups) is None:
            raise EngineError(
                f"sequence {seq.id} was admitted without the pages for {tokens} tokens"
            )

    def has_page_for_everyone(self, tokens: int = 1) -> bool:
        """Return whether every running sequence can have `tokens` more positions."""
        span = self._config.page_span
        needy = [seq for seq in self.running if seq.num_computed + tokens > seq.room]
        return all(
            sum(max(span(seq.num_computed + tokens) - len(seq.pages[group]), 0) for seq in needy)
            <= cache.pool.available
            for group, cache in enumerate(self.caches)
        )

    def _extend(self, seq: Sequence, tokens: int, groups: Iterable[int]) -> list[FreshPage] | None:
        span = self._config.page_span(tokens)
        need = {group: max(span - len(seq.pages[group]), 0) for group in groups}
        if any(count > self.caches[group].pool.available for group, count in need.items()):
            return None
        fresh = []
        for group, count in need.items():
            pages = self.caches[group].pool.allocate(count)
            self._note_overwritten(group, pages)
            for page in pages:
                fresh.append((group, seq.row, len(seq.pages[group]), page))
                seq.pages[group].append(page)
        self._count_room(seq)
        return fresh

    def _count_room(self, seq: Sequence) -> None:
        seq.room = min(map(len, seq.pages)) * self._config.page_size

    def leave(self, seq: Sequence) -> None:
        """Take row and pages back; no step in flight may refer to them any more."""
        if seq.in_flight:
            raise EngineError(
                f"sequence {seq.id} leaves its row with {seq.in_flight} steps in flight"
            )
        if seq.draft_computed:
            self.note_drafted(seq, seq.draft_computed)
        for cache, pages in zip(self.caches, seq.pages, strict=True):
            cache.pool.release([page for page in pages if page != NO_PAGE])
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

        Full pages can then be found by others, and pages that windows have passed come back.
        """
        page_size = self._config.page_size
        filled = seq.settled // page_size < position // page_size
        seq.settled = position
        if filled:
            self.publish(seq)
        if self.has_windows:
            self.slide(seq)

    def slide(self, seq: Sequence) -> None:
        """Give back the pages of windows that no query sees any more.

        No step that is in flight or still to come begins before `settled`.
        """
        for pool, cache, pages in zip(self._config.pools, self.caches, seq.pages, strict=True):
            end = self._first_seen(pool, seq.settled)
            begin = end
            while begin > 0 and pages[begin - 1] != NO_PAGE:
                begin -= 1
            cache.pool.release(pages[begin:end], passed=True)
            pages[begin:end] = [NO_PAGE] * (end - begin)

    def publish(self, seq: Sequence) -> None:
        """Make the sequence's settled full pages findable."""
        if not self._config.prefix_cache:
            return
        size = self._config.page_size
        full = self._publishable(seq) // size
        for cache, chain, pages in zip(self.caches, seq.chains, seq.pages, strict=True):
            first = chain.published
            if first >= full:
                continue
            self.extend_chains(seq.chains, seq.tokens, seq.request.salt, full)
            for i in range(first, full):
                # A cached prefix may begin behind the first pages of a window: they are not here.
                if pages[i] != NO_PAGE:
                    cache.publish(chain.digests[i], seq.tokens[i * size : (i + 1) * size], pages[i])
            chain.published = full

    def _publishable(self, seq: Sequence) -> int:
        """Return how many settled positions other sequences may share."""
        if not self._config.deterministic:
            return seq.settled
        # The bits of a page are known only if prefill steps computed it between fixed borders.
        if seq.scores_prompt:
            return 0
        border = self._config.chunk_border
        return min(seq.settled, seq.prompt_len // border * border)

    def adopt(
        self,
        group: int,
        tokens: list[int],
        chain: DigestChain,
        pages: range,
        write: Callable[[list[int]], None],
    ) -> int:
        """Publish these pages of a chain, which another engine computed, see PrefixCache.adopt.

        Returns how many are new here; 0, and nothing is written, if a page that has to come before
        them is missing: they would never be found.
        """
        cache = self.caches[group]
        digests = chain.digests[: pages.stop]
        # A window needs no page before the first one that is sent.
        needed = 0 if self._config.pools[group].window is None else pages.start
        if len(cache.lookup_run(digests[: pages.start], tokens, needed)) < pages.start - needed:
            return 0

        def fill(taken: list[int]) -> None:
            self._note_overwritten(group, taken)
            write(taken)

        return cache.adopt(digests, tokens, pages.start, fill)

    def extend_chains(
        self, chains: list[DigestChain], tokens: list[int], salt: str, pages: int
    ) -> None:
        """Extend the chains of every group to `pages` pages; the result is alike in every lane."""
        for group, chain in enumerate(chains):
            root = root_digest(self._fingerprint, self._config.kv, group, salt)
            chain.extend(root, tokens, self._config.page_size, pages)

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


def _first_missing(pages: list[int]) -> int:
    return pages.index(NO_PAGE) if NO_PAGE in pages else len(pages)
