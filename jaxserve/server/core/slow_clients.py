"""Detection of clients that do not read: a write that takes too long ends its stream.

All writes under way are looked at every so often by one timer. A timer for each message would cost
too much at ten thousand messages a second.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from jaxserve.errors import SlowConsumerError

CHECKS_PER_LIMIT = 10  # a slow write is found within a tenth of the limit after it


class Write:
    """Marks a message as being written, for as long as its `with` block lasts."""

    def __init__(self, scope: asyncio.Timeout):
        self.scope = scope  # around the whole stream
        self.began: float | None = None  # monotonic; None between two messages

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.began = None


class SlowClients:
    """The streams that are being written. Lives on the event loop.

    Args:
        seconds: Seconds in which a client has to take a message.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._writes: set[Write] = set()
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[Write]:
        """Watch the writes of one stream; SlowConsumerError when one of them takes too long."""
        try:
            async with asyncio.timeout(None) as scope:
                write = Write(scope)
                self._writes.add(write)
                self._schedule()
                try:
                    yield write
                finally:
                    self._writes.discard(write)
        except TimeoutError:
            raise SlowConsumerError(
                f"a message was not read within {self._seconds:g} s (--slow-client-seconds)"
            ) from None

    def _schedule(self) -> None:
        if self._timer is None and self._writes:
            delay = self._seconds / CHECKS_PER_LIMIT
            self._timer = asyncio.get_running_loop().call_later(delay, self._check)

    def _check(self) -> None:
        self._timer = None
        now = time.monotonic()
        for write in self._writes:
            if write.began is not None and now - write.began > self._seconds:
                write.scope.reschedule(-1)  # a time in the past: the scope times out at once
        self._schedule()
