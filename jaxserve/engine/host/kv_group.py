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

    def extend(self, table: list[int], tokens: int) -> list[tuple[int, int]]:
        """Give a table entries for `tokens` positions; return index and page of each new one.

        As many pages as it lacks have to be available.
        """
        begin = len(table)
        table += self.pool.allocate(self.lacking(table, tokens))
        return list(enumerate(table[begin:], begin))

    def fits(self, hit: list[int], tokens: int) -> bool:
        """Return whether a sequence that gets the cached pages `hit` finds pages for `tokens`."""
        held = kept(hit)
        # Idle pages of the hit count as available, and entering takes them out of that number.
        available = self.pool.available - self.pool.idle_among(held)
        return self.policy.held(tokens) - len(held) <= available

    def share(self, hit: list[int]) -> None:
        """Make a sequence a holder of cached pages."""
        self.pool.share(kept(hit))

    def give_back(self, table: list[int]) -> None:
        """Take every page of a table back."""
        self.pool.release(kept(table))

    def slide(self, table: list[int], settled: int) -> None:
        """Take back the pages that no query at `settled` or behind it sees."""
        passed = self.policy.release(table, settled)
        self.pool.release([table[i] for i in passed], passed=True)
        for i in passed:
            table[i] = NO_PAGE

    def publish(
        self, chain: DigestChain, tokens: list[int], table: list[int], stop: int, prompt_len: int
    ) -> None:
        """Make the full pages before index `stop` findable that were not offered before."""
        size = self.policy.page_size
        for i in range(chain.published, stop):
            # A cached prefix may begin behind the first pages of a window: they are not here.
            if table[i] != NO_PAGE and self.policy.is_findable((i + 1) * size, prompt_len):
                self.publish_entry(chain, tokens, table, i)
        chain.published = stop

    def publish_entry(
        self, chain: DigestChain, tokens: list[int], table: list[int], index: int
    ) -> None:
        """Make one full page findable."""
        size = self.policy.page_size
        page_tokens = tokens[index * size : (index + 1) * size]
        self.cache.publish(chain.digests[index], page_tokens, table[index])

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


def kept(table: list[int]) -> list[int]:
    """Return the pages of a table, without the places of those that are not kept."""
    return [page for page in table if page != NO_PAGE]
