"""Limit the bytes of host memory that one side of a transfer holds at a time."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from jaxserve.cluster.transfer.ticket import TransferError


@dataclass(eq=False, slots=True)
class _Waiting:
    nbytes: int
    granted: asyncio.Event = field(default_factory=asyncio.Event)


class ByteBudget:
    """Bytes that are granted in the order of the requests.

    A large request is not overtaken by small ones, which would starve it.

    Args:
        nbytes: The most bytes that are granted at a time, the value of --transfer-buffer.
        owner: Words that complete error texts.
    """

    def __init__(self, nbytes: int, owner: str = "of the decode server"):
        self.nbytes = nbytes
        self.held = 0
        self._owner = owner
        self._queue: deque[_Waiting] = deque()

    @property
    def waiting(self) -> int:
        """Number of requests that wait for bytes."""
        return len(self._queue)

    async def take(self, nbytes: int, deadline: float) -> None:
        """Wait for bytes, which `give` returns; TransferError at the deadline."""
        if nbytes > self.nbytes:
            raise TransferError(
                "RESOURCE_EXHAUSTED",
                f"a piece of {nbytes} bytes needs a larger --transfer-buffer {self._owner} (now "
                f"{self.nbytes} bytes)",
            )
        waiting = _Waiting(nbytes)
        self._queue.append(waiting)
        self._grant()
        try:
            async with asyncio.timeout_at(deadline):
                await waiting.granted.wait()
        except BaseException as error:
            self._leave(waiting)
            if isinstance(error, TimeoutError):
                held = f"{self.held} of {self.nbytes} (--transfer-buffer {self._owner}) are held"
                raise TransferError(
                    "RESOURCE_EXHAUSTED", f"no room for {nbytes} bytes in time: {held}"
                ) from None
            raise

    def give(self, nbytes: int) -> None:
        """Return bytes that were taken."""
        self.held -= nbytes
        self._grant()

    @asynccontextmanager
    async def hold(self, nbytes: int, deadline: float) -> AsyncIterator[None]:
        """Take bytes for as long as the block lasts."""
        await self.take(nbytes, deadline)
        try:
            yield
        finally:
            self.give(nbytes)

    def _leave(self, waiting: _Waiting) -> None:
        if waiting.granted.is_set():
            # The grant and the timeout or cancellation came in the same turn of the event loop.
            self.give(waiting.nbytes)
        else:
            self._queue.remove(waiting)
            self._grant()  # the request behind may need less

    def _grant(self) -> None:
        while self._queue and self.held + self._queue[0].nbytes <= self.nbytes:
            waiting = self._queue.popleft()
            self.held += waiting.nbytes
            waiting.granted.set()
