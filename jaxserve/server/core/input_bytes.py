"""Bound on the bytes of all requests that a server holds at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

from jaxserve.errors import QueueFullError

RETRY_SECONDS = 1.0


class InputBytes:
    """Counts the bytes of the bodies and messages that are received or worked on.

    Lives on the event loop.

    Args:
        limit: Most bytes at a time.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self.held = 0

    @contextmanager
    def holding(self) -> Iterator["HeldBytes"]:
        """Count what one request takes inside of the block, for as long as the block lasts."""
        held = HeldBytes(self)
        try:
            yield held
        finally:
            self.held -= held.size

    def check(self, more: int) -> None:
        """Raise QueueFullError unless there is room for some more bytes."""
        if self.held + more > self._limit:
            raise QueueFullError(
                f"all requests together have {self.held + more} bytes; the limit is {self._limit} "
                f"(--max-input-bytes)",
                RETRY_SECONDS,
            )


class HeldBytes:
    """The bytes of one request."""

    def __init__(self, all: InputBytes):
        self.size = 0
        self._all = all

    def add(self, size: int) -> None:
        """Count bytes that have come; QueueFullError where there is no room for them."""
        self._all.check(size)
        self._all.held += size
        self.size += size
