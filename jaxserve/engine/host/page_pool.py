"""A pool of KV pages with reference counts: every page is free, idle or held.

An idle page is held by no sequence and kept for the prefix cache; a free page holds nothing.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from jaxserve.errors import EngineError


class PagePool:
    """Page ids 0..num_pages-1 of one page group in one lane.

    Idle pages are given away when no free page is left, the least recently held first.

    Args:
        forget: Function called with each idle page that is given away, before its content is lost.
    """

    def __init__(self, num_pages: int, forget: Callable[[int], None] = lambda page: None):
        self.num_pages = num_pages
        self._free = deque(range(num_pages))
        self._idle: OrderedDict[int, None] = OrderedDict()  # the next to be given away first
        self._holders = [0] * num_pages
        self._cached = [False] * num_pages
        self._was_shared = [False] * num_pages  # since the page got its present content
        self._forget = forget

    @property
    def available(self) -> int:
        """Return the number of pages that `allocate` could hand out now."""
        return len(self._free) + len(self._idle)

    def holders(self, page: int) -> int:
        """Return how many sequences hold a page."""
        return self._holders[page]

    def idle_among(self, pages: Iterable[int]) -> int:
        """Return how many of these cached pages no sequence holds."""
        return sum(self._holders[page] == 0 for page in pages)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, idle ones last; raise EngineError if fewer are available."""
        if count > self.available:
            raise EngineError(
                f"asked for {count} pages; {self.available} of {self.num_pages} are available"
            )
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        page = self._free.popleft() if self._free else self._evict()
        self._holders[page] = 1
        self._was_shared[page] = False
        return page

    def _evict(self) -> int:
        """Return the idle page that is the next to be given away, and forget its content."""
        page, _ = self._idle.popitem(last=False)
        self._cached[page] = False
        self._forget(page)
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each of these cached pages."""
        for page in pages:
            if self._holders[page] == 0:
                del self._idle[page]
            self._holders[page] += 1
            self._was_shared[page] = True

    def release(self, pages: list[int], passed: bool = False) -> None:
        """Take a holder from each of these pages of one sequence, in the order of its table.

        Args:
            passed: Whether a sliding window has moved past the pages in the middle of a sequence.
                Those that were never shared are then the first to be given away: one long prompt
                must not drive out what others share.
        """
        # Later pages go first, so that eviction shortens cached prefixes from their end.
        for page in reversed(pages):
            if self._holders[page] < 1:
                raise EngineError(f"page {page} is released more often than it was taken")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if self._cached[page]:
                    self._idle[page] = None
                    if passed and not self._was_shared[page]:
                        self._idle.move_to_end(page, last=False)
                else:
                    self._free.append(page)

    def mark_cached(self, page: int) -> None:
        """Let the page become idle instead of free when its last holder releases it."""
        self._cached[page] = True

    def unmark_cached(self, page: int) -> None:
        """Let a held page become free when its last holder releases it."""
        self._cached[page] = False

    def drop_idle(self) -> None:
        """Forget every idle page."""
        while self._idle:
            self._free.append(self._evict())

    def check_invariants(self, held: Iterable[Iterable[int]]) -> None:
        """Raise EngineError unless free + idle + held pages are all pages.

        Args:
            held: Tables of all sequences, which must be the pages' holders.
        """
        counts = [0] * self.num_pages
        for table in held:
            for page in table:
                counts[page] += 1
        if counts != self._holders:
            wrong = [p for p in range(self.num_pages) if counts[p] != self._holders[p]]
            raise EngineError(
                f"pages {wrong[:8]} have other holders than the tables that list them"
            )
        used = sum(count > 0 for count in counts)
        if len(self._free) + len(self._idle) + used != self.num_pages:
            raise EngineError(
                f"{len(self._free)} free + {len(self._idle)} idle + {used} held is not "
                f"{self.num_pages} pages"
            )
        if set(self._free) & set(self._idle) or any(counts[p] for p in (*self._free, *self._idle)):
            raise EngineError("a page is in two states at once")
