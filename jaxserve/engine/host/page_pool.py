"""A pool of pages with reference counts. A page is free, idle (cached, nobody holds it) or held."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from jaxserve.errors import EngineError


class PagePool:
    """Page ids 0..num_pages-1 of one page group in one lane.

    Idle pages keep what the prefix cache found worth keeping and are given away when no free page
    is left, the least recently held first; `forget` is told which.
    """

    def __init__(self, num_pages: int, forget: Callable[[int], None] = lambda page: None):
        self.num_pages = num_pages
        self._free = deque(range(num_pages))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_pages
        self._cached = [False] * num_pages
        self._wanted = [False] * num_pages  # was shared since it holds what it holds
        self._forget = forget

    @property
    def available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + len(self._idle)

    def idle_among(self, pages: Iterable[int]) -> int:
        return sum(self._holders[page] == 0 for page in pages)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages; EngineError when so many are not available (the caller has to ask
        first).
        """
        if count > self.available:
            raise EngineError(
                f"asked for {count} pages; {self.available} of {self.num_pages} are available"
            )
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            page = self._free.popleft()
        else:
            page, _ = self._idle.popitem(last=False)
            self._cached[page] = False
            self._forget(page)
        self._holders[page], self._wanted[page] = 1, False
        return page

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of these cached pages."""
        for page in pages:
            if self._holders[page] == 0:
                del self._idle[page]
            self._holders[page] += 1
            self._wanted[page] = True

    def release(self, pages: list[int], passed: bool = False) -> None:
        """One holder less. Later pages of a sequence go first, so that eviction shortens prefixes
        from their end.

        passed: a window went past them in the middle of a sequence. Those that nobody ever shared
        are then the first to be given away: one long prompt must not drive out what others share.
        """
        for page in reversed(pages):
            if self._holders[page] < 1:
                raise EngineError(f"page {page} is released more often than it was taken")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if self._cached[page]:
                    self._idle[page] = None
                    if passed and not self._wanted[page]:
                        self._idle.move_to_end(page, last=False)
                else:
                    self._free.append(page)

    def keep(self, page: int) -> None:
        """The prefix cache knows this page: when nobody holds it any more it stays idle instead of
        free.
        """
        self._cached[page] = True

    def drop_idle(self) -> None:
        """Forget every idle page."""
        while self._idle:
            page, _ = self._idle.popitem(last=False)
            self._cached[page] = False
            self._forget(page)
            self._free.append(page)

    def check_invariants(self, held: Iterable[Iterable[int]]) -> None:
        """free + idle + held = all, and every holder is a table in `held`; EngineError with the
        numbers otherwise.
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
