"""KVGroup: the pages of one page group in one lane, as the group's policy has them kept."""

from collections.abc import Callable, Sequence

from jaxserve.config.kv_policy import NO_PAGE, KVPolicy
from jaxserve.engine.host.prefix_cache import DigestChain, PrefixCache


class KVGroup:
    """Pool and prefix cache of a page group, and what its policy does with a sequence's table.

    A table lists the page ids of a sequence in this group, NO_PAGE for pages that are not kept.
    """

    def __init__(self, policy: KVPolicy, num_pages: int):
        self.policy = policy
        self.cache = PrefixCache(num_pages, policy.page_size)
        self.pool = self.cache.pool

    def lacking(self, table: list[int], tokens: int) -> int:
        """Return how many more pages a sequence needs for `tokens` positions."""
        return max(self.policy.span(tokens) - len(table), 0)

    def fits(self, hit: list[int], tokens: int) -> bool:
        """Return whether a sequence that gets the cached pages `hit` finds pages for `tokens`."""
        held = _kept(hit)
        # Idle pages of the hit count as available, and entering takes them out of that number.
        available = self.pool.available - self.pool.idle_among(held)
        return self.policy.held(tokens) - len(held) <= available

    def share(self, hit: list[int]) -> None:
        """Make a sequence a holder of cached pages."""
        self.pool.share(_kept(hit))

    def give_back(self, table: list[int]) -> None:
        """Take every page of a table back."""
        self.pool.release(_kept(table))

    def slide(self, table: list[int], settled: int) -> None:
        """Take back the pages that no query at `settled` or behind it sees."""
        passed = self.policy.release(table, settled)
        self.pool.release([table[i] for i in passed], passed=True)
        for i in passed:
            table[i] = NO_PAGE

    def publish(self, chain: DigestChain, tokens: list[int], table: list[int], stop: int) -> None:
        """Make the full pages before index `stop` findable that were not offered before."""
        size = self.policy.page_size
        for i in range(chain.published, stop):
            # A cached prefix may begin behind the first pages of a window: they are not here.
            if table[i] != NO_PAGE:
                page_tokens = tokens[i * size : (i + 1) * size]
                self.cache.publish(chain.digests[i], page_tokens, table[i])
        chain.published = stop

    def adopt(
        self,
        tokens: Sequence[int],
        chain: DigestChain,
        pages: range,
        write: Callable[[list[int]], None],
    ) -> int:
        """Publish these pages of a chain, which another engine computed, see PrefixCache.adopt.

        Returns how many are new here; 0, and nothing is written, if a page that has to come before
        them is missing: they would never be found.
        """
        digests = chain.digests[: pages.stop]
        needed = self.policy.first_needed_before(pages.start)
        before = self.cache.lookup_run(digests[: pages.start], tokens, needed)
        if len(before) < pages.start - needed:
            return 0
        return self.cache.adopt(digests, tokens, pages.start, write)


def _kept(table: list[int]) -> list[int]:
    return [page for page in table if page != NO_PAGE]
