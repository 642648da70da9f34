"""Lane: one index of the mesh's data axis, with its own pages, prefix cache and rows."""

from heapq import heapify, heappop, heappush

from jaxserve.config import EngineConfig
from jaxserve.engine.prefix_cache import PrefixCache, root_digest
from jaxserve.engine.sequence import Sequence
from jaxserve.errors import EngineError


class Lane:
    """Owns what a sequence occupies on the device; a sequence stays in its lane, page ids are local to it."""

    def __init__(self, index: int, config: EngineConfig, page_groups: int, fingerprint: str):
        self.index = index
        self._config = config
        self._fingerprint = fingerprint
        self.caches = [PrefixCache(config.num_pages, config.page_size) for _ in range(page_groups)]
        self.running: list[Sequence] = []
        self.blocked: Sequence | None = None  # lacked pages in the step before: it goes first, nobody is admitted
        self._free_rows = list(range(config.max_batch))
        heapify(self._free_rows)

    @property
    def has_row(self) -> bool:
        return bool(self._free_rows)

    @property
    def draining(self) -> bool:
        """A sequence has ended or was preempted, and its pages come back with the step in flight."""
        return any(seq.preempted or seq.finish for seq in self.running)

    def available_pages(self) -> int:
        return min(cache.pool.available for cache in self.caches)

    def hit(self, seq: Sequence) -> list[list[int]]:
        """Pages per group of the longest cached prefix; at least one token is left to compute."""
        if not self._config.prefix_cache or seq.scores_prompt:
            return [[] for _ in self.caches]
        full = (len(seq.tokens) - 1) // self._config.page_size
        self._extend_chains(seq, full)
        found = [
            cache.lookup(chain.digests[:full], seq.tokens) for cache, chain in zip(self.caches, seq.chains, strict=True)
        ]
        length = min(len(pages) for pages in found)
        if self._config.deterministic:
            border = self._config.chunk_border // self._config.page_size
            length = length // border * border
        return [pages[:length] for pages in found]

    def fits(self, seq: Sequence, hit: list[list[int]], tokens: int) -> bool:
        """Whether pages for `tokens` positions are available to a sequence that holds only `hit`."""
        need = self._config.page_span(tokens)
        return all(
            need - len(pages) <= cache.pool.available - cache.pool.idle_among(pages)
            for cache, pages in zip(self.caches, hit, strict=True)
        )

    def enter(self, seq: Sequence, hit: list[list[int]]) -> None:
        """Give the sequence a row and its cached prefix."""
        for cache, pages in zip(self.caches, hit, strict=True):
            cache.pool.share(pages)
        seq.lane, seq.row = self.index, heappop(self._free_rows)
        seq.pages = [list(pages) for pages in hit]
        seq.num_computed = seq.settled = len(hit[0]) * self._config.page_size
        self.running.append(seq)
        self.running.sort(key=lambda s: s.rank)

    def extend(self, seq: Sequence, tokens: int) -> list[tuple[int, int, int, int]] | None:
        """New pages (group, row, index, page) so that the sequence can hold `tokens` positions; None: too few pages."""
        need = [self._config.page_span(tokens) - len(pages) for pages in seq.pages]
        if any(n > cache.pool.available for n, cache in zip(need, self.caches, strict=True)):
            return None
        fresh = []
        for group, (count, cache, pages) in enumerate(zip(need, self.caches, seq.pages, strict=True)):
            for page in cache.pool.allocate(max(count, 0)):
                fresh.append((group, seq.row, len(pages), page))
                pages.append(page)
        return fresh

    def leave(self, seq: Sequence) -> None:
        """Take row and pages back. Nothing that is in flight may refer to them any more."""
        if seq.in_flight:
            raise EngineError(f"sequence {seq.id} leaves its row with {seq.in_flight} steps in flight")
        for cache, pages in zip(self.caches, seq.pages, strict=True):
            cache.pool.release(pages)
        heappush(self._free_rows, seq.row)
        self.running.remove(seq)
        seq.lane = seq.row = -1
        seq.pages = []
        seq.num_computed = seq.settled = 0
        seq.newest_on_device = False
        for chain in seq.chains:
            chain.published = 0

    def publish(self, seq: Sequence) -> None:
        """Make the sequence's settled full pages findable."""
        if not self._config.prefix_cache:
            return
        settled = seq.settled
        if self._config.deterministic:  # only what prefill steps computed between fixed borders has known bits
            border = self._config.chunk_border
            settled = 0 if seq.scores_prompt else min(settled, seq.prompt_len // border * border)
        size = self._config.page_size
        full = settled // size
        for cache, chain, pages in zip(self.caches, seq.chains, seq.pages, strict=True):
            known = chain.published
            if known >= full:
                continue
            self._extend_chains(seq, full)
            for i in range(known, full):
                cache.publish(chain.digests[i], seq.tokens[i * size : (i + 1) * size], pages[i])
            chain.published = full

    def _extend_chains(self, seq: Sequence, pages: int) -> None:
        for group, chain in enumerate(seq.chains):
            root = root_digest(self._fingerprint, group, seq.request.salt)
            chain.extend(root, seq.tokens, self._config.page_size, pages)

    def check_invariants(self) -> None:
        rows = [seq.row for seq in self.running] + self._free_rows
        if sorted(rows) != list(range(self._config.max_batch)):
            raise EngineError(f"lane {self.index}: rows {sorted(rows)} are not each free or taken once")
        for group, cache in enumerate(self.caches):
            cache.pool.check_invariants([seq.pages[group] for seq in self.running])
