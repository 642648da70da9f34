"""Which failed calls are made again, and when. Everything here is the same for both clients."""

import math
import random
import time
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from jaxserve.client.errors import CallError, error_of, trailers_of

PUSHBACK = "grpc-retry-pushback-ms"
LONGEST = 60.0  # seconds that a server can make a client wait
FIRST, LAST = 0.2, 5.0  # seconds of back-off, where the server says nothing


class Attempts:
    """Of one call: how often it may be made again, and how much time is left for all of it.

    Made again is what ended with UNAVAILABLE, and with RESOURCE_EXHAUSTED when the server says when
    to come back; never what has brought a message. A wait that the deadline does not allow is not
    begun: the caller gets the error.

    gRPC's own retry policy was tried, and does something else: RESOURCE_EXHAUSTED without a word of
    the server is retried too (a request over its size limit is sent five times); a request over 256
    KiB is not, unless a buffer is raised; more than five attempts are five; and it sleeps into the
    deadline, so that the reason is lost.
    """

    def __init__(self, retries: int, timeout: float | None):
        self._left = retries
        self._backoff = FIRST
        self._until = math.inf if timeout is None else time.monotonic() + timeout

    @property
    def timeout(self) -> float | None:
        """Seconds that are left; None: any."""
        return None if self._until == math.inf else self._until - time.monotonic()

    def end(self) -> None:
        """A message came: from now on every failure is final."""
        self._left = 0

    def wait(self, failure: grpc.RpcError) -> float:
        """Seconds until the next attempt; JaxserveError when there is none."""
        delay = self._delay(failure) if self._left else None
        if delay is None or time.monotonic() + delay >= self._until:
            raise error_of(failure) from failure
        self._left -= 1
        return delay

    def _delay(self, failure: Any) -> float | None:
        pushback = trailers_of(failure).get(PUSHBACK)
        if failure.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
            return None
        if pushback is not None:
            return _seconds(pushback)
        return self._next_backoff() if failure.code() is grpc.StatusCode.UNAVAILABLE else None

    def _next_backoff(self) -> float:
        delay, self._backoff = self._backoff, min(2 * self._backoff, LAST)
        return delay * random.uniform(
            0.8, 1.2
        )  # clients that failed together do not come back together


def _seconds(pushback: str) -> float | None:
    """None: not at all, which is what a negative number says, or one that is none."""
    seconds = int(pushback) / 1000 if pushback.isdecimal() else -1.0
    return seconds if 0 <= seconds <= LONGEST else None


class Readiness:
    """Of a server that is asked again and again whether it serves."""

    INTERVAL = 0.1  # seconds between two questions
    PASSING = (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.NOT_FOUND,
    )

    def __init__(self, address: str, timeout: float):
        self._address, self._timeout = address, timeout
        self._until = time.monotonic() + timeout
        self._news = "no answer came"

    @property
    def timeout(self) -> float:
        """Seconds that are left; CallError when there are none."""
        left = self._until - time.monotonic()
        if left <= 0:
            problem = f"{self._address} was not ready within {self._timeout:g} s: {self._news}"
            raise CallError("DEADLINE_EXCEEDED", problem)
        return left

    def heard(self, answer: HealthCheckResponse) -> float | None:
        """Seconds until the next question; None: it is ready."""
        if answer.status == HealthCheckResponse.SERVING:
            return None
        return self._pause(HealthCheckResponse.ServingStatus.Name(answer.status))

    def failed(self, failure: Any) -> float | None:
        """The same of a question that failed; JaxserveError when it always would."""
        if failure.code() not in self.PASSING:
            raise error_of(failure) from failure
        return self._pause(failure.details() or failure.code().name)

    def _pause(self, news: str) -> float:
        self._news = news
        return min(self.INTERVAL, self.timeout)
