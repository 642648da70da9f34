"""The open connections of an HTTP server: how many there may be, and a look at each of them."""

import asyncio
import logging
import math
import time
from collections import Counter
from typing import Protocol

from jaxserve.server.core.limits import Limits

RESERVE = 64  # connections beyond the limit, on which health checks and refusals are answered
CHECKS_PER_LIMIT = 10  # a slow client is found within a tenth of the limit after it
LONGEST_PERIOD = 1.0  # seconds
log = logging.getLogger(__name__)


class Checked(Protocol):
    """A connection, as far as this module needs it."""

    def check(self, now: float) -> None:
        """End the connection if its client has been too slow."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...


class OpenConnections[C: Checked]:
    """The open connections of a server. Lives on the event loop.

    Beyond --max-http-connections there is room for a few more, which are told that the server is
    full: a client learns when to come again, and a health check is answered. The oldest of these
    makes room for a new one, so that clients who say nothing cannot keep health checks out.

    All connections are looked at every so often by one timer. A timer for each request would cost
    too much at thousands of requests a second.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self._admitted: set[C] = set()
        self._beyond: dict[C, None] = {}  # beyond the limit, the oldest first
        self._closed = Counter[str]()  # since the last look at all, by the reason
        self._timer: asyncio.TimerHandle | None = None
        self.last_traffic = -math.inf  # monotonic time at which anything happened on any of them

    @property
    def all(self) -> list[C]:
        """The open connections, in no order."""
        return [*self._admitted, *self._beyond]

    def add(self, connection: C) -> bool:
        """Take a new connection in, and return whether requests on it may be served."""
        self.note()
        is_served = len(self._admitted) < self._limits.max_http_connections
        if is_served:
            self._admitted.add(connection)
        else:
            self._add_beyond(connection)
        self._schedule()
        return is_served

    def _add_beyond(self, connection: C) -> None:
        if len(self._beyond) >= RESERVE:
            oldest = next(iter(self._beyond))
            del self._beyond[oldest]
            oldest.abort()
        self._beyond[connection] = None

    def remove(self, connection: C) -> None:
        """Forget a connection that is closed."""
        self._admitted.discard(connection)
        self._beyond.pop(connection, None)

    def note(self) -> None:
        """Note that something happens on a connection now."""
        self.last_traffic = time.monotonic()

    def count_closed(self, reason: str) -> None:
        """Count a connection that is closed because of its client, for the log."""
        self._closed[reason] += 1

    def _schedule(self) -> None:
        if self._timer is None and (self._admitted or self._beyond or self._closed):
            period = min(LONGEST_PERIOD, self._limits.slow_client_seconds / CHECKS_PER_LIMIT)
            self._timer = asyncio.get_running_loop().call_later(period, self._check)

    def _check(self) -> None:
        self._timer = None
        now = time.monotonic()
        for connection in self.all:
            connection.check(now)
        self._log()
        self._schedule()

    def _log(self) -> None:
        """Write one line at most, however many clients are at fault."""
        if self._closed:
            counts = (f"{count} {reason}" for reason, count in sorted(self._closed.items()))
            log.warning("HTTP connections closed: %s", ", ".join(counts))
            self._closed.clear()
