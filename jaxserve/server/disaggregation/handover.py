"""Handover: before a request is submitted, its prompt's pages are fetched from a server that computes prompts.

What comes lies in the prefix cache when the request is submitted, which then runs as any other does: the tokens behind
the last whole page, and the first new one, are computed here. Whatever fails costs time alone.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Protocol

from jaxserve.cluster.transfer.prefill import Prompt
from jaxserve.engine.buckets import PIECES_AT_ONCE
from jaxserve.engine.piece import Piece
from jaxserve.engine.transfers import Import
from jaxserve.errors import JaxserveError
from jaxserve.request import Request
from jaxserve.server.disaggregation.decision import Decision, Policy
from jaxserve.server.disaggregation.prefill_pool import PrefillPool, PrefillServer
from jaxserve.server.engine_thread import EngineThread

LOCAL = "a prompt is computed here, as far as it did not come from %s: %s"
log = logging.getLogger(__name__)


class Observer(Protocol):
    """Who counts."""

    def decided(self, decision: Decision) -> None: ...

    def received(self, nbytes: int) -> None:
        """A piece."""
        ...

    def ended(self, seconds: float, failure: str | None) -> None:
        """A handover. failure: why not all came: a gRPC code in small letters; None: all did."""
        ...


class Handover:
    """For requests on their way to an engine. Lives on the event loop.

    page_size: of that engine. seconds: that the trip of a prompt may take, --transfer-timeout.
    """

    def __init__(
        self,
        thread: EngineThread,
        page_size: int,
        pool: PrefillPool,
        policy: Policy,
        seconds: float,
        observer: Observer,
    ):
        self._thread, self._page_size = thread, page_size
        self._pool, self._policy, self._seconds = pool, policy, seconds
        self._observer = observer
        self._installing = ThreadPoolExecutor(PIECES_AT_ONCE, "install")

    async def prepare(self, request: Request) -> None:
        """Have as much of its prompt cached as can be had. A JaxserveError only when the engine has ended."""
        try:
            async with asyncio.timeout(None if request.deadline is None else request.deadline - time.monotonic()):
                decision, found = await self._decide(request)
        except TimeoutError:
            return  # the engine's step outlasts its deadline: whoever submits the request ends it
        self._observer.decided(decision)
        if found:
            server, arriving = found
            with self._observed(server.address):
                await self._fetch(request, server, arriving)

    def close(self) -> None:
        self._installing.shutdown(wait=False, cancel_futures=True)

    async def _decide(self, request: Request) -> tuple[Decision, tuple[PrefillServer, Import] | None]:
        prompt, salt = request.prompt, request.salt
        if request.params.prompt_logprobs is not None:
            return Decision.SCORED, None
        if self._policy.is_short(len(prompt)):
            return Decision.SHORT, None
        if not self._pool.ready:
            return Decision.ALONE, None
        arriving = await asyncio.wrap_future(self._thread.call(lambda engine: engine.transfers.receive(prompt, salt)))
        if self._policy.is_short(len(prompt) - arriving.cached):
            return Decision.SHORT, None
        if not (ready := self._pool.ready):
            return Decision.ALONE, None
        server = self._policy.choose(prompt, salt, ready)
        return (Decision.REMOTE, (server, arriving)) if server else (Decision.BUSY, None)

    @contextmanager
    def _observed(self, address: str) -> Iterator[None]:
        """Around a handover: what it fails with ends here."""
        began, failure = time.monotonic(), "cancelled"
        try:
            yield
            failure = None
        except JaxserveError as error:
            failure = error.code.lower()
            log.warning(LOCAL, address, error)
        except TimeoutError:
            failure = "deadline_exceeded"
            log.warning(LOCAL, address, "it fell silent, or its deadline or --transfer-timeout has passed")
        except Exception:
            failure = "internal"
            log.exception(LOCAL, address, "a bug")
        finally:
            self._observer.ended(time.monotonic() - began, failure)

    async def _fetch(self, request: Request, server: PrefillServer, arriving: Import) -> None:
        loop, seconds = asyncio.get_running_loop(), self._seconds
        if request.deadline is not None:
            seconds = min(seconds, request.deadline - time.monotonic())
        deadline = loop.time() + seconds
        prompt = Prompt(
            token_ids=request.prompt,
            salt=request.salt,
            start=arriving.cached,
            page_size=self._page_size,
            priority=request.priority,
        )
        async with asyncio.timeout_at(deadline) as limit, aclosing(server.pieces(prompt, deadline)) as pieces:
            with server.ending(limit):
                async for piece in pieces:
                    self._observer.received(piece.nbytes)
                    await loop.run_in_executor(self._installing, self._install, arriving, piece, seconds)

    def _install(self, arriving: Import, piece: Piece, seconds: float) -> None:
        """On a thread that may wait."""
        for staged in arriving.stage(piece, seconds):
            _wait(self._thread.call(lambda engine, staged=staged: arriving.install(staged)), seconds)


def _wait(call: "Future[int]", seconds: float) -> None:
    try:
        call.result(seconds)
    finally:
        call.cancel()  # where it was not made in time
