"""Rules of both clients: which failed calls are made again, and when."""

import math
import random
import time
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from jaxserve.client.errors import CallError, error_of, trailers_of

PUSHBACK = "grpc-retry-pushback-ms"
LONGEST = 60.0  # seconds that a server can make a client wait
# Seconds of back-off, where the server does not say when to come back; doubled after each attempt.
FIRST_BACKOFF = 0.2
LAST_BACKOFF = 5.0


class Attempts:
    """Attempts at one call: how many are left, and how much time for all of them.

    A call is made again that ended with UNAVAILABLE, with RESOURCE_EXHAUSTED if the server says
    when to come back, or unseen by a server that stops; a call that has brought a message is not. A
    wait that goes beyond the deadline is not begun: the caller gets the error at once.

    gRPC's own retry policy was tried, and does something else: it retries RESOURCE_EXHAUSTED where
    the server does not say when to come back (a request over its size limit is sent five times), it
    does not retry a request over 256 KiB unless a buffer is raised, it takes more than five
    attempts for five, and it sleeps into the deadline, so that the reason is lost.
    """

    def __init__(self, retries: int, timeout: float | None):
        self._left = retries
        self._backoff = FIRST_BACKOFF
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout

    @property
    def timeout(self) -> float | None:
        """Seconds that are left; None is any time."""
        return None if self._deadline == math.inf else self._deadline - time.monotonic()

    def end(self) -> None:
        """Note that a message came: from now on every failure is final."""
        self._left = 0

    def next_delay(self, failure: grpc.RpcError) -> float:
        """Return the seconds until the next attempt; JaxserveError if there is none."""
        delay = self._delay(failure) if self._left else None
        if delay is None or time.monotonic() + delay >= self._deadline:
            raise error_of(failure) from failure
        self._left -= 1
        return delay

    def _delay(self, failure: Any) -> float | None:
        """Return the seconds to wait, or None for a failure that is final."""
        code = failure.code()
        if is_unseen(failure):
            return self._next_backoff()
        if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
            return None
        pushback = trailers_of(failure).get(PUSHBACK)
        if pushback is not None:
            return _seconds(pushback)
        return self._next_backoff() if code is grpc.StatusCode.UNAVAILABLE else None

    def _next_backoff(self) -> float:
        delay = self._backoff
        self._backoff = min(2 * delay, LAST_BACKOFF)
        # Clients that failed together shall not come back together.
        return delay * random.uniform(0.8, 1.2)


def is_unseen(failure: Any) -> bool:
    """Return whether gRPC's library refused the call, since its server had begun to stop.

    No handler saw it: it arrived before its client could read that the server goes away. Handlers,
    and clients that cancel, give other details.
    """
    return failure.code() is grpc.StatusCode.CANCELLED and failure.details() == "CANCELLED"


def _seconds(pushback: str) -> float | None:
    """Return the seconds of a pushback in ms; None for "do not come back".

    gRPC's rule: a negative number says so, and anything that is no number.
    """
    seconds = int(pushback) / 1000 if pushback.isdecimal() else -1.0
    return seconds if 0 <= seconds <= LONGEST else None


class ReadinessPoll:
    """Question to a server whether it serves, repeated until it does or the time has passed."""

    INTERVAL = 0.1  # seconds
    PASSING = (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.NOT_FOUND,
    )

    def __init__(self, address: str, timeout: float):
        self._address = address
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._last_state = "no answer came"

    @property
    def timeout(self) -> float:
        """Seconds that are left; CallError if there are none."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            problem = (
                f"{self._address} was not ready within {self._timeout:g} s: {self._last_state}"
            )
            raise CallError("DEADLINE_EXCEEDED", problem)
        return left

    def after_answer(self, answer: HealthCheckResponse) -> float | None:
        """Return the seconds until the next question; None if the server is ready."""
        if answer.status == HealthCheckResponse.SERVING:
            return None
        return self._pause(HealthCheckResponse.ServingStatus.Name(answer.status))

    def after_failure(self, failure: Any) -> float | None:
        """Return the seconds until the next question; JaxserveError if it would fail again."""
        if failure.code() not in self.PASSING:
            raise error_of(failure) from failure
        return self._pause(failure.details() or failure.code().name)

    def _pause(self, state: str) -> float:
        self._last_state = state
        return min(self.INTERVAL, self.timeout)
