"""Writes that take too long: the client does not read, and loses its stream.

One look at all of them every so often, instead of a timer for each message: at ten thousand
messages a second that is what can be afforded.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from jaxserve.errors import SlowConsumerError


class Write:
    """In a `with`: a message is being written."""

    def __init__(self, scope: asyncio.Timeout):
        self.scope = scope
        self.began: float | None = None

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.began = None


class SlowClients:
    """Streams that are being written. seconds: for one message to be taken, and up to a tenth
    more."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._writes: set[Write] = set()
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[Write]:
        """SlowConsumerError out of the block when one of its writes takes too long."""
        try:
            async with asyncio.timeout(None) as scope:
                write = Write(scope)
                self._writes.add(write)
                self._look_later()
                try:
                    yield write
                finally:
                    self._writes.discard(write)
        except TimeoutError:
            raise SlowConsumerError(
                f"a message was not read within {self._seconds:g} s (--slow-client-seconds)"
            ) from None

    def _look_later(self) -> None:
        if self._timer is None and self._writes:
            self._timer = asyncio.get_running_loop().call_later(self._seconds / 10, self._look)

    def _look(self) -> None:
        self._timer, now = None, time.monotonic()
        for write in self._writes:
            if write.began is not None and now - write.began > self._seconds:
                write.scope.reschedule(-1)  # at once
        self._look_later()
