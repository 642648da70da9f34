"""One request of a load, with a reading of the clock for each message of its answer.

Callers do as little as possible per message: work for one request delays the readings of all
others.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from jaxserve.bench.latency import OK, Outcome
from jaxserve.client.channel import TLS

# Statuses of requests that failed at the client.
CUT = "CUT"  # the stream had no end
SHORT = "SHORT"  # the answer had another number of tokens than asked for
TIMEOUT = "TIMEOUT"  # --timeout passed, not the server's deadline


class Refused(Exception):
    """A request that ended with something else than its tokens.

    Args:
        status: Word under which the request is counted.
        retry_after: Seconds after which the server wants to be asked again; None: it does not say.
    """

    def __init__(self, status: str, text: str, retry_after: float | None = None):
        super().__init__(" ".join(text.split()))
        self.status = status
        self.retry_after = retry_after


class Credentials(NamedTuple):
    """Token and certificates of a connection; without tls it is in plain text."""

    token: str | None = None
    tls: TLS | None = None


class Caller(Protocol):
    """A way to send requests to a server."""

    def prepare(self, prompt: Sequence[int] | str, output_tokens: int, salt: str) -> Any:
        """Return a request, made before its time.

        Args:
            salt: Salt of cached pages, which only requests with the same salt share.
        """
        ...

    async def ask(self, request: Any, outcome: Outcome) -> None:
        """Send a request and note what arrives; Refused if it is not what was asked for."""
        ...


async def call(caller: Caller, request: Any, outcome: Outcome, seconds: float) -> None:
    """Make one request and note its outcome, for at most this many seconds.

    The outcome of a call that is cancelled stays UNFINISHED.
    """
    outcome.sent = time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            await caller.ask(request, outcome)
        _check_length(outcome)
    except TimeoutError:
        outcome.status = TIMEOUT
        outcome.error = f"no end after {seconds:g} s (--timeout)"
    except Refused as error:
        outcome.status = error.status
        outcome.error = str(error)
        outcome.retry_after = error.retry_after
    else:
        outcome.status = OK
    outcome.ended = time.monotonic()


def _check_length(outcome: Outcome) -> None:
    wanted = outcome.output_tokens
    fewest = 1 if outcome.may_end_early else wanted
    if not fewest <= outcome.received <= wanted:
        raise Refused(SHORT, f"{outcome.received} tokens came instead of {wanted}")
