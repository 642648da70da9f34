"""Handover: before a request is submitted, its prompt's pages are fetched from whoever computes
prompts.

What comes lies in the prefix cache when the request is submitted, which then runs as any other
does: the tokens behind the last whole page, and the first new one, are computed here. Whatever
fails costs time alone.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing, contextmanager
from typing import Protocol

from jaxserve.cluster.transfer.prefill import Prompt
from jaxserve.engine.buckets import SEGMENTS_ON_DEVICE
from jaxserve.engine.host.kv_import import KVImport, StagedPages
from jaxserve.errors import JaxserveError
from jaxserve.request import Request
from jaxserve.server.core.engine_thread import EngineThread
from jaxserve.server.disaggregation.policy import Candidate, Decision, Policy
from jaxserve.server.disaggregation.prefix_affinity import blocks_of

LOCAL = "a prompt is computed here, as far as it did not come from %s: %s"
log = logging.getLogger(__name__)


class Arrival(Protocol):
    """Some of a prompt's pages, wherever they are."""

    @property
    def nbytes(self) -> int: ...

    def stage(self, arriving: KVImport, timeout: float) -> Iterator[StagedPages]:
        """Bring them to the devices, see KVImport.stage. On a thread that may wait."""
        ...


class Prefiller(Candidate, Protocol):
    """Who computes prompts. name: for the log."""

    @property
    def name(self) -> str: ...

    def arrivals(self, prompt: Prompt, deadline: float) -> AsyncGenerator[Arrival, None]:
        """What it computes, in order; each is staged before the next is asked for. Closing it gives
        the prompt up.

        deadline: of the event loop's clock. JaxserveError when not all of it comes; what came
        before is good.
        """
        ...

    def ending(self, limit: asyncio.Timeout) -> AbstractContextManager[None]:
        """Around waiting for it: when it is gone, the time is over."""
        ...


class Pool(Protocol):
    @property
    def ready(self) -> Sequence[Prefiller]:
        """Those who would take a prompt now."""
        ...


class Observer(Protocol):
    """Who counts."""

    def decided(self, decision: Decision) -> None: ...

    def received(self, nbytes: int) -> None:
        """An arrival."""
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
        pool: Pool,
        policy: Policy,
        seconds: float,
        observer: Observer,
    ):
        self._thread, self._page_size = thread, page_size
        self._pool, self._policy, self._seconds = pool, policy, seconds
        self._observer = observer
        self._installing = ThreadPoolExecutor(SEGMENTS_ON_DEVICE, "install")

    async def prepare(self, request: Request) -> None:
        """Have as much of its prompt cached as can be had. A JaxserveError only when the engine has
        ended.
        """
        try:
            async with asyncio.timeout(
                None if request.deadline is None else request.deadline - time.monotonic()
            ):
                decision, found = await self._decide(request)
        except TimeoutError:
            return  # the engine's step outlasts its deadline: whoever submits the request ends it
        self._observer.decided(decision)
        if found:
            prefiller, arriving = found
            with self._observed(prefiller.name):
                await self._fetch(request, prefiller, arriving)

    def close(self) -> None:
        self._installing.shutdown(wait=False, cancel_futures=True)

    async def _decide(self, request: Request) -> tuple[Decision, tuple[Prefiller, KVImport] | None]:
        prompt, salt = request.prompt, request.salt
        if request.params.prompt_logprobs is not None:
            return Decision.SCORED, None
        if self._policy.is_short(len(prompt)):
            return Decision.SHORT, None
        if not self._pool.ready:
            return Decision.ALONE, None
        arriving = await asyncio.wrap_future(
            self._thread.call(lambda engine: engine.transfers.receive(prompt, salt))
        )
        if self._policy.is_short(len(prompt) - arriving.cached):
            return Decision.SHORT, None
        if not (ready := self._pool.ready):
            return Decision.ALONE, None
        prefiller = self._policy.choose(blocks_of(prompt, salt), ready)
        return (Decision.REMOTE, (prefiller, arriving)) if prefiller else (Decision.BUSY, None)

    @contextmanager
    def _observed(self, name: str) -> Iterator[None]:
        """Around a handover: what it fails with ends here."""
        began, failure = time.monotonic(), "cancelled"
        try:
            yield
            failure = None
        except JaxserveError as error:
            failure = error.code.lower()
            log.warning(LOCAL, name, error)
        except TimeoutError:
            failure = "deadline_exceeded"
            log.warning(
                LOCAL,
                name,
                "it fell silent, or --transfer-timeout has passed, or half of the time to the "
                "request's deadline",
            )
        except Exception:
            failure = "internal"
            log.exception(LOCAL, name, "a bug")
        finally:
            self._observer.ended(time.monotonic() - began, failure)

    async def _fetch(self, request: Request, prefiller: Prefiller, arriving: KVImport) -> None:
        loop, seconds = asyncio.get_running_loop(), self._seconds
        if request.deadline is not None:
            seconds = min(
                seconds, (request.deadline - time.monotonic()) / 2
            )  # the rest is for computing it here
        deadline = loop.time() + seconds
        prompt = Prompt(
            token_ids=request.prompt,
            salt=request.salt,
            start=arriving.cached,
            page_size=self._page_size,
            priority=request.priority,
        )
        async with (
            asyncio.timeout_at(deadline) as limit,
            aclosing(prefiller.arrivals(prompt, deadline)) as arrivals,
        ):
            with prefiller.ending(limit):
                async for arrival in arrivals:
                    self._observer.received(arrival.nbytes)
                    await loop.run_in_executor(
                        self._installing, self._install, arriving, arrival, seconds
                    )

    def _install(self, arriving: KVImport, arrival: Arrival, seconds: float) -> None:
        """On a thread that may wait."""
        for staged in arrival.stage(arriving, seconds):
            _wait(
                self._thread.call(lambda engine, staged=staged: arriving.install(staged)), seconds
            )


def _wait(call: "Future[int]", seconds: float) -> None:
    try:
        call.result(seconds)
    finally:
        call.cancel()  # where it was not made in time
