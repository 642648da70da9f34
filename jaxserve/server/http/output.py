"""The output of an HTTP connection, and how fast its client takes it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT


@dataclass
class Unread:
    """Answers that their client has not taken completely, since a moment."""

    since: float
    taken: int  # bytes taken before


class Output:
    """A connection's transport for uvicorn, which counts bytes and leaves the closing to `close`.

    To close a socket whose client still sends is to reset it: the client would lose the answer.
    What is written after the end is dropped.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]):
        self.close = close
        self._transport = transport
        self._written = 0  # bytes
        self._closing_since: float | None = None
        self._unread: Unread | None = None

    def write(self, data: bytes) -> None:
        if not self.is_closing():
            self._written += len(data)
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self._closing_since is not None or self._transport.is_closing()

    def is_closing_for(self, seconds: float) -> bool:
        """Return whether the connection was closed here at least so long ago."""
        since = self._closing_since
        return since is not None and time.monotonic() - since >= seconds

    def end(self) -> None:
        """Let the client see the end of the last answer, and go on reading."""
        self._closing_since = time.monotonic()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def close_now(self) -> None:
        """Close the connection once all is written."""
        self._closing_since = time.monotonic()
        self._transport.close()

    def is_read_too_slowly(self, now: float, seconds: float) -> bool:
        """Return whether the client has taken less than 64 KiB, and not all, for so long.

        To be called every now and then.
        """
        waiting = self._transport.get_write_buffer_size()
        taken = self._written - waiting
        # Over TLS some bytes are where they cannot be seen, and a closed connection waits for them.
        if waiting == 0 and self._closing_since is None:
            self._unread = None
        elif self._unread is None or taken - self._unread.taken >= HIGH_WATER_LIMIT:
            self._unread = Unread(now, taken)
        return self._unread is not None and now - self._unread.since > seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
