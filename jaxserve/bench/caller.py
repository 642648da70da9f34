"""One request, with a reading of the clock for each message of its answer.

As little as can be is done for a message: what is done for one request delays the readings of all
others.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from jaxserve.bench.latency import OK, Outcome
from jaxserve.client.channel import TLS

CUT, SHORT = (
    "CUT",
    "SHORT",
)  # a stream without its end; an answer with another number of tokens than asked for
TIMEOUT = "TIMEOUT"  # ours, not the server's


class Refused(Exception):
    """A request ended with something else than its tokens. status: a word to count it by."""

    def __init__(self, status: str, text: str):
        super().__init__(" ".join(text.split()))
        self.status = status


class Credentials(NamedTuple):
    """tls None: in plain text."""

    token: str | None = None
    tls: TLS | None = None


class Caller(Protocol):
    def prepare(self, prompt: Sequence[int] | str, output_tokens: int, salt: str) -> Any:
        """A request, made before its time. salt: cached pages are shared only among requests with
        the same.
        """
        ...

    async def ask(self, request: Any, outcome: Outcome) -> None:
        """Send it, and write down what comes; Refused when that is not what was asked for."""
        ...


async def call(caller: Caller, request: Any, outcome: Outcome, seconds: float) -> None:
    """The whole of one request, or what comes of it in so many seconds. Cancelled, it stays
    UNFINISHED.
    """
    outcome.sent = time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            await caller.ask(request, outcome)
        asked, came = outcome.output_tokens, outcome.received
        if not (1 <= came <= asked if outcome.may_end_early else came == asked):
            raise Refused(SHORT, f"{came} tokens came instead of {asked}")
    except TimeoutError:
        outcome.status, outcome.error = TIMEOUT, f"no end after {seconds:g} s (--timeout)"
    except Refused as error:
        outcome.status, outcome.error = error.status, str(error)
    else:
        outcome.status = OK
    outcome.ended = time.monotonic()
