"""Bytes of the host's memory that one side of a transfer may hold at a time."""

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


class Budget:
    """Who asks first is served first, so that large pieces are not starved by small ones."""

    def __init__(self, nbytes: int, whose: str = "of the decode server"):
        """whose: for errors."""
        self.nbytes, self._whose = nbytes, whose
        self.held = 0
        self._queue: deque[_Waiting] = deque()

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._queue)

    async def take(self, nbytes: int, deadline: float) -> None:
        """Wait for room; `give` has to follow. TransferError when there is none by the deadline."""
        if nbytes > self.nbytes:
            raise TransferError(
                "RESOURCE_EXHAUSTED",
                f"a piece of {nbytes} bytes needs a larger --transfer-buffer {self._whose} (now "
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
                held = f"{self.held} of {self.nbytes} (--transfer-buffer {self._whose}) are held"
                raise TransferError(
                    "RESOURCE_EXHAUSTED", f"no room for {nbytes} bytes in time: {held}"
                ) from None
            raise

    def give(self, nbytes: int) -> None:
        self.held -= nbytes
        self._grant()

    @asynccontextmanager
    async def hold(self, nbytes: int, deadline: float) -> AsyncIterator[None]:
        """Room for as long as the block lasts."""
        await self.take(nbytes, deadline)
        try:
            yield
        finally:
            self.give(nbytes)

    def _leave(self, waiting: _Waiting) -> None:
        if waiting.granted.is_set():  # in the same turn of the loop
            self.give(waiting.nbytes)
        else:
            self._queue.remove(waiting)
            self._grant()  # who stood behind may need less

    def _grant(self) -> None:
        while self._queue and self.held + self._queue[0].nbytes <= self.nbytes:
            waiting = self._queue.popleft()
            self.held += waiting.nbytes
            waiting.granted.set()
