"""An engine that computes prompts for another one: a prompt is a request for one token, and its
pages leave.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager

from jaxserve.cluster.transfer.handshake import Handshake
from jaxserve.cluster.transfer.prefill import Prompt
from jaxserve.cluster.transfer.ticket import TransferError
from jaxserve.engine.engine import Engine
from jaxserve.engine.host.kv_export import KVExport, PagesToSend
from jaxserve.engine.kv_segment import KVSegment
from jaxserve.errors import JaxserveError
from jaxserve.request import SamplingParams
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.engine_thread import EngineThread
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.service import Service
from jaxserve.server.readiness import Readiness

ONE_TOKEN = SamplingParams(
    max_tokens=1, temperature=0.0, seed=0
)  # whoever decodes draws the first token


log = logging.getLogger(__name__)


class PrefillSource:
    """What PrefillServicer asks of it, see `Source`; the model comes when the gate opens."""

    def __init__(self, readiness: Readiness):
        self._readiness = readiness
        self._copying = ThreadPoolExecutor(2, "pages-to-host")

    @property
    def handshake(self) -> Handshake:
        handshake = self._readiness.require_ready().handshake
        assert handshake, "a prefill server's engine exchanges pages"
        return handshake

    @property
    def waiting_tokens(self) -> int:
        return self._readiness.require_ready().service.waiting_tokens

    async def pieces(
        self, prompt: Prompt, seconds: float | None
    ) -> AsyncGenerator[KVSegment, None]:
        served, loop = self._readiness.require_ready(), asyncio.get_running_loop()
        async with departing(
            served.service, served.thread, prompt, seconds, to_host=True
        ) as departure:
            while outgoing := await departure.next():
                try:
                    piece = await loop.run_in_executor(self._copying, departure.to_host, outgoing)
                finally:
                    departure.drop(outgoing)  # where nobody came to it
                yield piece
                del piece

    def close(self) -> None:
        self._copying.shutdown(wait=False, cancel_futures=True)


@asynccontextmanager
async def departing(
    service: Service, thread: EngineThread, prompt: Prompt, seconds: float | None, to_host: bool
) -> "AsyncIterator[Departure]":
    """While the prompt is computed. seconds: see `Source.pieces`. to_host: where its pages will
    go."""
    call = IncomingRequest(
        prompt=prompt.token_ids,
        prompt_field="token_ids",
        params=ONE_TOKEN,
        prefill=True,
        priority=prompt.priority,
        cache_salt=prompt.salt,
        timeout=seconds,
    )
    with await service.answer(call) as answer:
        departure = Departure(thread, answer, to_host)
        try:
            await departure.begin(prompt)
            yield departure
        finally:
            departure.end()


class Departure:
    """One prompt's pages, on their way from the engine's thread to the event loop. begin, next ...,
    and end always.
    """

    def __init__(self, thread: EngineThread, answer: Answer, to_host: bool):
        self._thread, self._answer, self._to_host = thread, answer, to_host
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[PagesToSend | JaxserveError | None] = asyncio.Queue()
        self._watching: asyncio.Task[None] | None = None
        self._exporting: Future[KVExport] | None = None
        self._over = False

    async def begin(self, prompt: Prompt) -> None:
        request = self._answer.prepared.request
        self._watching = asyncio.create_task(self._watch())
        self._exporting = self._thread.call(
            lambda engine: engine.transfers.export(
                request, prompt.start, prompt.page_size, self._deliver
            )
        )
        await asyncio.wrap_future(self._exporting)

    async def next(self) -> PagesToSend | None:
        """None when all have come. A JaxserveError when the rest will not, behind what came
        before."""
        arrived = await self._arrived.get()
        if isinstance(arrived, JaxserveError):
            raise arrived
        if arrived is None:
            self._check_whole()
            self._answer.exported = True
        return arrived

    def _check_whole(self) -> None:
        assert self._exporting, "it has begun"
        if missing := self._exporting.result().missing:
            problem = (
                f"{missing} pages were evicted before they could leave (--cache-tokens of "
                f"the prefill server)"
            )
            raise TransferError("NOT_FOUND", problem)

    def to_host(self, outgoing: PagesToSend) -> KVSegment:
        """On a thread that may wait."""
        try:
            return outgoing.to_host()
        finally:
            self._advance()

    def drop(self, outgoing: PagesToSend) -> None:
        """What was not taken of it is not wanted; what waited for its place may come."""
        outgoing.drop()
        self._advance()

    def end(self) -> None:
        """Nothing more is wanted."""
        self._over = True
        self._thread.call(self._close)
        if self._watching:
            self._watching.cancel()
        while not self._arrived.empty():
            self._leave(self._arrived.get_nowait())

    async def _watch(self) -> None:
        """A request that ends in a step without output, or with an error, is noticed as well."""
        try:
            await self._answer.whole()
            self._advance()
        except JaxserveError as error:
            self._arrived.put_nowait(error)
        except Exception as error:
            log.exception("a prompt of a decode server failed")
            self._arrived.put_nowait(
                TransferError("INTERNAL", f"{type(error).__name__} (see this server's log)")
            )

    def _advance(self) -> None:
        self._thread.call(lambda engine: engine.transfers.advance()).add_done_callback(_report)

    def _close(self, engine: Engine) -> None:
        """On the engine's thread, where the export began before, unless it was given up before."""
        exporting = self._exporting
        if exporting and not exporting.cancelled() and not exporting.exception():
            engine.transfers.close(exporting.result())

    def _deliver(self, outgoing: PagesToSend | None) -> None:
        """On the engine's thread."""
        if outgoing and self._to_host:
            outgoing.start_to_host()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, outgoing)

    def _take(self, outgoing: PagesToSend | None) -> None:
        if self._over:
            self._leave(outgoing)
        else:
            self._arrived.put_nowait(outgoing)

    def _leave(self, arrived: PagesToSend | JaxserveError | None) -> None:
        if isinstance(arrived, PagesToSend):
            self.drop(arrived)


def _report(done: "Future[None]") -> None:
    """Nobody waits for it."""
    error = None if done.cancelled() else done.exception()
    if error and not isinstance(error, JaxserveError):
        log.error("pages of a prompt could not be read", exc_info=error)
