"""Fetch a prompt's pages from a prefill server before its request is submitted to the engine.

The pages are installed in the prefix cache, so that the request then runs as any other does: the
tokens behind the last whole page, and the first output token, are computed here. A failure costs
time, never a wrong or missing answer: pages that did not come are computed here.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing, contextmanager
from typing import Protocol

from jaxserve.cluster.transfer.prefill import PrefillPrompt
from jaxserve.engine.buckets import SEGMENTS_ON_DEVICE
from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.host.kv_import import KVImport, StagedPages
from jaxserve.errors import JaxserveError
from jaxserve.request import Request
from jaxserve.server.disaggregation.metrics import DecodeMetrics
from jaxserve.server.disaggregation.policy import Candidate, Decision, Policy
from jaxserve.server.disaggregation.prefix_affinity import blocks_of

LOCAL = "a prompt is computed here, except for the pages that came from %s: %s"
log = logging.getLogger(__name__)


class IncomingPages(Protocol):
    """Some of a prompt's pages, in host memory or on devices of another mesh."""

    @property
    def nbytes(self) -> int: ...

    def stage(self, arriving: KVImport, timeout: float) -> Iterator[StagedPages]:
        """Copy the pages to the decode mesh, see KVImport.stage. Blocks; not for the event loop."""
        ...


class Prefiller(Candidate, Protocol):
    """A server, or a mesh of this process, that computes prompts; `name` is for the log."""

    @property
    def name(self) -> str: ...

    def compute(
        self, prompt: PrefillPrompt, deadline: float
    ) -> AsyncGenerator[IncomingPages, None]:
        """Compute a prompt and yield its pages in order; closing the generator gives it up.

        Each part has to be staged before the next is asked for. `deadline` is a time of the event
        loop's clock. JaxserveError when some pages do not come; the parts before are good.
        """
        ...

    def expiring(self, limit: asyncio.Timeout) -> AbstractContextManager[None]:
        """Let `limit` expire at once if the prefiller is lost within the block."""
        ...


class Pool(Protocol):
    """The prefillers of a decode server."""

    @property
    def ready(self) -> Sequence[Prefiller]:
        """Prefillers that would take a prompt now."""
        ...


class RemotePrefill:
    """Brings prompts' pages into the prefix cache of one engine. Lives on the event loop.

    `page_size` is the engine's. `seconds` is the time that one prompt may take,
    --transfer-timeout.
    """

    def __init__(
        self,
        thread: EngineThread,
        page_size: int,
        pool: Pool,
        policy: Policy,
        seconds: float,
        metrics: DecodeMetrics,
    ):
        self._thread = thread
        self._page_size = page_size
        self._pool = pool
        self._policy = policy
        self._seconds = seconds
        self._metrics = metrics
        self._installing = ThreadPoolExecutor(SEGMENTS_ON_DEVICE, "install")

    async def prepare(self, request: Request) -> None:
        """Have as much of the request's prompt cached as can be had.

        Raises a JaxserveError only when the engine has ended.
        """
        left = None if request.deadline is None else request.deadline - time.monotonic()
        try:
            async with asyncio.timeout(left):
                decision, found = await self._decide(request)
        except TimeoutError:
            # A step of the engine outlasts the request's deadline. The service submits the request
            # next, and ends it there.
            return
        self._metrics.decided(decision)
        if found:
            prefiller, arriving = found
            with self._observed(prefiller.name):
                await self._fetch(request, prefiller, arriving)

    def close(self) -> None:
        self._installing.shutdown(wait=False, cancel_futures=True)

    async def _decide(self, request: Request) -> tuple[Decision, tuple[Prefiller, KVImport] | None]:
        # The cheap reasons come first: the number of cached tokens is a question to the engine's
        # thread, which answers between two steps.
        prompt = request.prompt
        salt = request.salt
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
        ready = self._pool.ready  # again: servers may have come and gone during the step
        if not ready:
            return Decision.ALONE, None
        prefiller = self._policy.choose(blocks_of(prompt, salt), ready)
        if prefiller is None:
            return Decision.BUSY, None
        return Decision.REMOTE, (prefiller, arriving)

    @contextmanager
    def _observed(self, name: str) -> Iterator[None]:
        """Count and log a remote prefill, and swallow its failure."""
        began = time.monotonic()
        failure: str | None = "cancelled"
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
            self._metrics.ended(time.monotonic() - began, failure)

    async def _fetch(self, request: Request, prefiller: Prefiller, arriving: KVImport) -> None:
        loop = asyncio.get_running_loop()
        seconds = self._seconds
        if request.deadline is not None:
            # Half of the time left stays for computing the prompt here after a failure.
            seconds = min(seconds, (request.deadline - time.monotonic()) / 2)
        deadline = loop.time() + seconds
        prompt = PrefillPrompt(
            token_ids=request.prompt,
            salt=request.salt,
            start=arriving.cached,
            page_size=self._page_size,
            priority=request.priority,
            client=request.client,
        )
        async with (
            asyncio.timeout_at(deadline) as limit,
            aclosing(prefiller.compute(prompt, deadline)) as parts,
        ):
            with prefiller.expiring(limit):
                async for pages in parts:
                    self._metrics.received(pages.nbytes)
                    await loop.run_in_executor(
                        self._installing, self._install, arriving, pages, seconds
                    )

    def _install(self, arriving: KVImport, pages: IncomingPages, seconds: float) -> None:
        """Stage the pages on this thread, and install them on the engine's."""
        for staged in pages.stage(arriving, seconds):
            _wait(
                self._thread.call(lambda engine, staged=staged: arriving.install(staged)), seconds
            )


def _wait(call: "Future[int]", seconds: float) -> None:
    try:
        call.result(seconds)
    finally:
        call.cancel()  # without effect unless the time ran out before the call began
