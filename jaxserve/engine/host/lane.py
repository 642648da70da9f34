"""Lane: one index of the mesh's data axis, with its own pages, prefix cache and rows."""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from jaxserve.config import EngineConfig, Pool
from jaxserve.engine.host.page_pool import NO_PAGE
from jaxserve.engine.host.prefix_cache import DigestChain, PrefixCache, root_digest
from jaxserve.engine.host.sequence import Sequence
from jaxserve.errors import EngineError


class Lane:
    """Owns what a sequence occupies on the device; a sequence stays in its lane, page ids are local
    to it.
    """

    def __init__(self, index: int, config: EngineConfig, fingerprint: str):
        self.index = index
        self._config = config
        self._fingerprint = fingerprint
        self.caches = [
            PrefixCache(pool.pages, config.page_size) for pool in config.pools
        ]  # per page group
        self.running: list[Sequence] = []
        self.blocked: Sequence | None = (
            None  # lacked pages in the step before: it goes first, nobody is admitted
        )
        self.has_windows = any(pool.window for pool in config.pools)
        self._drafted = set[
            int
        ]()  # pages of the group without a window that the draft model has filled as well
        self._free_rows = list(range(config.max_batch))
        heapify(self._free_rows)

    @property
    def has_row(self) -> bool:
        return bool(self._free_rows)

    @property
    def draining(self) -> bool:
        """A sequence has ended or was preempted, and its pages come back with the step in
        flight."""
        return any(seq.preempted or seq.finish for seq in self.running)

    def available_pages(self) -> int:
        return min(cache.pool.available for cache in self.caches)

    def hit(self, seq: Sequence) -> list[list[int]]:
        """Pages per group of the longest cached prefix; at least one token is left to compute.

        A group with a window needs only the pages that the next token sees; NO_PAGE stands for
        those before.
        """
        if not self._config.prefix_cache or seq.scores_prompt:
            return [[] for _ in self.caches]
        self.extend_chains(
            seq.chains,
            seq.tokens,
            seq.request.salt,
            (len(seq.tokens) - 1) // self._config.page_size,
        )
        return self.cached(seq.tokens, seq.chains)

    def cached(self, tokens: list[int], chains: list[DigestChain]) -> list[list[int]]:
        """The same for tokens whose chains reach as far as a hit may."""
        full = (len(tokens) - 1) // self._config.page_size
        found = [
            cache.lookup(chain.digests[:full], tokens)
            for cache, chain in zip(self.caches, chains, strict=True)
        ]
        step = (
            self._config.chunk_border // self._config.page_size if self._config.deterministic else 1
        )
        whole = min((_first_missing(pages) for pages in self._of_full_groups(found)), default=full)
        length = next(
            (n for n in range(whole // step * step, 0, -step) if self._covered(found, n)), 0
        )
        return [
            self._kept(pages[:length], first)
            for pages, first in zip(found, self._firsts(length), strict=True)
        ]

    def _firsts(self, pages: int) -> list[int]:
        """Per group the first page that the token after so many full pages sees."""
        return [
            self._first_seen(pool, pages * self._config.page_size) for pool in self._config.pools
        ]

    def _first_seen(self, pool: Pool, position: int) -> int:
        return pool.first_seen(position) // self._config.page_size

    def _of_full_groups(self, found: list[list[int]]) -> list[list[int]]:
        return [
            pages
            for pool, pages in zip(self._config.pools, found, strict=True)
            if pool.window is None
        ]

    def _covered(self, found: list[list[int]], length: int) -> bool:
        """Whether of a prefix of so many pages every group with a window has what will be seen."""
        return all(
            pool.window is None or NO_PAGE not in pages[first:length]
            for pool, pages, first in zip(
                self._config.pools, found, self._firsts(length), strict=True
            )
        )

    def _kept(self, pages: list[int], first: int) -> list[int]:
        return [NO_PAGE] * first + pages[first:]

    def fits(self, seq: Sequence, hit: list[list[int]], tokens: int) -> bool:
        """Whether pages for `tokens` positions are available to a sequence that holds only
        `hit`."""
        for pool, cache, pages in zip(self._config.pools, self.caches, hit, strict=True):
            held = [page for page in pages if page != NO_PAGE]
            need = self._config.pages_held(pool, tokens)
            if need - len(held) > cache.pool.available - cache.pool.idle_among(held):
                return False
            if (
                pool.window and self._config.deterministic
            ):  # its pages are not taken at admission, but are spoken for
                need += sum(self._config.pages_held(pool, s.limit) for s in self.running)
                if need > pool.pages:
                    return False
        return True

    def enter(self, seq: Sequence, hit: list[list[int]]) -> None:
        """Give the sequence a row and its cached prefix."""
        for cache, pages in zip(self.caches, hit, strict=True):
            cache.pool.share(page for page in pages if page != NO_PAGE)
        seq.lane, seq.row = self.index, heappop(self._free_rows)
        seq.pages = [list(pages) for pages in hit]
        seq.num_computed = seq.settled = len(hit[0]) * self._config.page_size
        self._count_room(seq)
        self.running.append(seq)
        self.running.sort(key=lambda s: s.rank)

    def extend(self, seq: Sequence, tokens: int) -> list[tuple[int, int, int, int]] | None:
        """New pages (group, row, index, page) so that the sequence can hold `tokens` positions;
        None: too few pages.
        """
        return [] if tokens <= seq.room else self._extend(seq, tokens, range(len(self.caches)))

    def has_page_for_everyone(self, tokens: int = 1) -> bool:
        """Whether every running sequence can have so many more positions."""
        span = self._config.page_span
        needy = [seq for seq in self.running if seq.num_computed + tokens > seq.room]
        return all(
            sum(max(span(seq.num_computed + tokens) - len(seq.pages[group]), 0) for seq in needy)
            <= cache.pool.available
            for group, cache in enumerate(self.caches)
        )

    def must_extend(self, seq: Sequence, tokens: int) -> list[tuple[int, int, int, int]]:
        """The same where the pages are sure to be there."""
        fresh = self.extend(seq, tokens)
        if fresh is None:
            raise EngineError(
                f"sequence {seq.id} has no page for {tokens} tokens, and there should be one"
            )
        return fresh

    def reserve(self, seq: Sequence, tokens: int) -> None:
        """Pages at admission, where the pages are sure to be there, and without the groups that
        slide a window.
        """
        if (
            self._extend(
                seq, tokens, [g for g, pool in enumerate(self._config.pools) if pool.window is None]
            )
            is None
        ):
            raise EngineError(
                f"sequence {seq.id} was admitted without the pages for {tokens} tokens"
            )

    def _extend(
        self, seq: Sequence, tokens: int, groups: Iterable[int]
    ) -> list[tuple[int, int, int, int]] | None:
        need = {
            group: max(self._config.page_span(tokens) - len(seq.pages[group]), 0)
            for group in groups
        }
        if any(count > self.caches[group].pool.available for group, count in need.items()):
            return None
        fresh = []
        for group, count in need.items():
            pages = self.caches[group].pool.allocate(count)
            if self._drafted and group == self._config.full_group:
                self._drafted.difference_update(pages)
            for page in pages:
                fresh.append((group, seq.row, len(seq.pages[group]), page))
                seq.pages[group].append(page)
        self._count_room(seq)
        return fresh

    def _count_room(self, seq: Sequence) -> None:
        seq.room = min(map(len, seq.pages)) * self._config.page_size

    def settle(self, seq: Sequence, position: int) -> None:
        """The tokens before `position` are in pages for good: full pages can be found, passed ones
        come back.
        """
        filled = seq.settled // self._config.page_size < position // self._config.page_size
        seq.settled = position
        if filled:
            self.publish(seq)
        if self.has_windows:
            self.slide(seq)

    def slide(self, seq: Sequence) -> None:
        """Give back the pages that no query sees any more: no step that is in flight or to come
        begins before `settled`.
        """
        for pool, cache, pages in zip(self._config.pools, self.caches, seq.pages, strict=True):
            end = self._first_seen(pool, seq.settled)
            begin = end
            while begin > 0 and pages[begin - 1] != NO_PAGE:
                begin -= 1
            cache.pool.release(pages[begin:end], passed=True)
            pages[begin:end] = [NO_PAGE] * (end - begin)

    def note_drafted(self, seq: Sequence, position: int) -> None:
        """The draft model has the tokens before `position` in pages for good."""
        self._drafted.update(
            seq.pages[self._config.full_group][: position // self._config.page_size]
        )

    def skip_drafted(self, seq: Sequence) -> None:
        """What the draft model has of a prefix that the sequence shares, it need not compute
        again."""
        pages, size = seq.pages[self._config.full_group], self._config.page_size
        index = seq.draft_computed // size
        while (index + 1) * size <= seq.num_known and pages[index] in self._drafted:
            index += 1
            seq.draft_computed = index * size

    def leave(self, seq: Sequence) -> None:
        """Take row and pages back. Nothing that is in flight may refer to them any more."""
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

    def publish(self, seq: Sequence) -> None:
        """Make the sequence's settled full pages findable."""
        if not self._config.prefix_cache:
            return
        settled = seq.settled
        if (
            self._config.deterministic
        ):  # only what prefill steps computed between fixed borders has known bits
            border = self._config.chunk_border
            settled = 0 if seq.scores_prompt else min(settled, seq.prompt_len // border * border)
        size = self._config.page_size
        full = settled // size
        for cache, chain, pages in zip(self.caches, seq.chains, seq.pages, strict=True):
            known = chain.published
            if known >= full:
                continue
            self.extend_chains(seq.chains, seq.tokens, seq.request.salt, full)
            for i in range(known, full):
                if pages[i] == NO_PAGE:
                    continue  # a cached prefix, behind the window from the beginning
                cache.publish(chain.digests[i], seq.tokens[i * size : (i + 1) * size], pages[i])
            chain.published = full

    def adopt(
        self,
        group: int,
        tokens: list[int],
        chain: DigestChain,
        pages: range,
        write: Callable[[list[int]], None],
    ) -> int:
        """Publish these pages of a chain, which another engine computed; how many are new here, see
        PrefixCache.adopt.

        None where the chain breaks off before them: nobody would find them.
        """
        cache, digests = self.caches[group], chain.digests[: pages.stop]
        needed = 0 if self._config.pools[group].window is None else pages.start
        if len(cache.lookup_run(digests[: pages.start], tokens, needed)) < pages.start - needed:
            return 0

        def fill(taken: list[int]) -> None:
            if self._drafted and group == self._config.full_group:
                self._drafted.difference_update(taken)
            write(taken)

        return cache.adopt(digests, tokens, pages.start, fill)

    def extend_chains(
        self, chains: list[DigestChain], tokens: list[int], salt: str, pages: int
    ) -> None:
        """Chains of every group, to so many pages; the same in every lane."""
        for group, chain in enumerate(chains):
            root = root_digest(self._fingerprint, self._config.kv, group, salt)
            chain.extend(root, tokens, self._config.page_size, pages)

    def check_invariants(self) -> None:
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
