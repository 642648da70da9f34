"""Compute prompts for another engine: each is a request for one token whose pages are exported."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager

from jaxserve.cluster.transfer.handshake import Handshake
from jaxserve.cluster.transfer.prefill import PrefillPrompt
from jaxserve.cluster.transfer.ticket import TransferError
from jaxserve.engine.engine import Engine
from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.host.kv_export import KVExport, PagesToSend
from jaxserve.engine.kv_segment import KVSegment
from jaxserve.errors import JaxserveError
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.service import Service
from jaxserve.server.readiness import Readiness

# The token is thrown away: the server that decodes computes the prompt's last position itself, and
# draws the first token from it.
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, seed=0)

log = logging.getLogger(__name__)


class PrefillSource:
    """A `Source` for PrefillServicer whose model is there once the gate is open."""

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

    async def segments(
        self, prompt: PrefillPrompt, seconds: float | None
    ) -> AsyncGenerator[KVSegment, None]:
        """Compute a prompt and yield its segments, see `Source`."""
        served = self._readiness.require_ready()
        loop = asyncio.get_running_loop()
        async with exporting(
            served.service, served.thread, prompt, seconds, to_host=True
        ) as export:
            while outgoing := await export.next():
                try:
                    segment = await loop.run_in_executor(self._copying, export.to_host, outgoing)
                finally:
                    export.drop(outgoing)  # without effect once it was copied
                yield segment
                del segment  # megabytes, which shall not wait here for the next one

    def close(self) -> None:
        self._copying.shutdown(wait=False, cancel_futures=True)


@asynccontextmanager
async def exporting(
    service: Service,
    thread: EngineThread,
    prompt: PrefillPrompt,
    seconds: float | None,
    to_host: bool,
) -> "AsyncIterator[PrefillExport]":
    """Compute the prompt and export its pages for as long as the block lasts.

    `seconds` is the time that the other side will wait, None for ever. `to_host` says that the
    pages will be copied to the host's memory, so that the copies can begin early.
    """
    call = IncomingRequest(
        prompt=prompt.token_ids,
        prompt_field="token_ids",
        params=ONE_TOKEN,
        prefill=True,
        priority=prompt.priority,
        client=prompt.client,
        cache_salt=prompt.salt,
        timeout=seconds,
    )
    with await service.answer(call) as answer:
        export = PrefillExport(thread, answer, to_host)
        try:
            await export.begin(prompt)
            yield export
        finally:
            export.end()


class PrefillExport:
    """One prompt's pages on their way from the engine's thread to the event loop.

    Call `begin`, then `next` until it returns None, and `end` in any case.
    """

    def __init__(self, thread: EngineThread, answer: Answer, to_host: bool):
        self._thread = thread
        self._answer = answer
        self._to_host = to_host
        self._loop = asyncio.get_running_loop()
        self._delivered: asyncio.Queue[PagesToSend | JaxserveError | None] = asyncio.Queue()
        self._watching: asyncio.Task[None] | None = None
        self._export: Future[KVExport] | None = None
        self._ended = False

    async def begin(self, prompt: PrefillPrompt) -> None:
        request = self._answer.prepared.request
        self._watching = asyncio.create_task(self._watch())
        self._export = self._thread.call(
            lambda engine: engine.transfers.export(
                request, prompt.start, prompt.page_size, self._deliver
            )
        )
        await asyncio.wrap_future(self._export)

    async def next(self) -> PagesToSend | None:
        """Return the next pages, or None after the last.

        JaxserveError, after the pages before, when the rest will not come.
        """
        delivered = await self._delivered.get()
        if isinstance(delivered, JaxserveError):
            raise delivered
        if delivered is None:
            self._check_complete()
            self._answer.exported = True
        return delivered

    def _check_complete(self) -> None:
        assert self._export, "begin was called"
        if missing := self._export.result().missing:
            problem = (
                f"{missing} pages or states were evicted before they could be sent, or found no "
                f"room (--cache-tokens and --snapshot-share of the prefill server)"
            )
            raise TransferError("NOT_FOUND", problem)

    def to_host(self, outgoing: PagesToSend) -> KVSegment:
        """Copy the pages to the host's memory. Waits for the devices; not for the event loop."""
        try:
            return outgoing.to_host()
        finally:
            self._advance()

    def drop(self, outgoing: PagesToSend) -> None:
        """Free the pages if they were not taken, and let the pages that wait for room follow."""
        outgoing.drop()
        self._advance()

    def end(self) -> None:
        """Stop the export; pages that were delivered and not taken are freed."""
        self._ended = True
        self._thread.call(self._close)
        if self._watching:
            self._watching.cancel()
        while not self._delivered.empty():
            self._free(self._delivered.get_nowait())

    async def _watch(self) -> None:
        # The engine advances exports after its steps. A request that ends otherwise, by an error
        # or a step without output, needs this to be noticed.
        try:
            await self._answer.whole()
            self._advance()
        except JaxserveError as error:
            self._delivered.put_nowait(error)
        except Exception as error:
            log.exception("a prompt of a decode server failed")
            problem = f"{type(error).__name__} (see this server's log)"
            self._delivered.put_nowait(TransferError("INTERNAL", problem))

    def _advance(self) -> None:
        self._thread.call(lambda engine: engine.transfers.advance()).add_done_callback(_log_failure)

    # ---- on the engine's thread

    def _close(self, engine: Engine) -> None:
        # The thread keeps the order of its calls, so the export has begun, failed or was cancelled.
        export = self._export
        if export and not export.cancelled() and not export.exception():
            engine.transfers.close(export.result())

    def _deliver(self, outgoing: PagesToSend | None) -> None:
        if outgoing and self._to_host:
            outgoing.start_to_host()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, outgoing)

    # ---- on the event loop

    def _take(self, outgoing: PagesToSend | None) -> None:
        if self._ended:
            self._free(outgoing)
        else:
            self._delivered.put_nowait(outgoing)

    def _free(self, delivered: PagesToSend | JaxserveError | None) -> None:
        if isinstance(delivered, PagesToSend):
            self.drop(delivered)


def _log_failure(done: "Future[None]") -> None:
    """Log an unexpected failure of a call whose result is not waited for."""
    error = None if done.cancelled() else done.exception()
    if error and not isinstance(error, JaxserveError):
        log.error("pages of a prompt could not be read", exc_info=error)
