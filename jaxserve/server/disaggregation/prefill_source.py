"""The engine of a server that computes prompts for others: a prompt is a request for one token, and its pages leave."""

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

from jaxserve.cluster.transfer.handshake import Handshake
from jaxserve.cluster.transfer.prefill import Prompt
from jaxserve.engine.piece import Piece
from jaxserve.engine.transfers import Outgoing
from jaxserve.errors import JaxserveError
from jaxserve.request import SamplingParams
from jaxserve.server.answer import Answer
from jaxserve.server.call import Call
from jaxserve.server.engine_thread import EngineThread
from jaxserve.server.gate import Gate

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, seed=0)  # whoever decodes draws the first token


class PrefillSource:
    """What PrefillServicer asks of it, see `Source`; the model comes when the gate opens."""

    def __init__(self, gate: Gate):
        self._gate = gate
        self._copying = ThreadPoolExecutor(2, "pages-to-host")

    @property
    def handshake(self) -> Handshake:
        handshake = self._gate.enter().handshake
        assert handshake, "a prefill server's engine exchanges pages"
        return handshake

    @property
    def waiting_tokens(self) -> int:
        return self._gate.enter().service.waiting_tokens

    async def pieces(self, prompt: Prompt, seconds: float | None) -> AsyncGenerator[Piece, None]:
        served, loop = self._gate.enter(), asyncio.get_running_loop()
        call = Call(
            prompt=prompt.token_ids,
            prompt_field="token_ids",
            params=ONE_TOKEN,
            prefill=True,
            priority=prompt.priority,
            cache_salt=prompt.salt,
            timeout=seconds,
        )
        with await served.service.answer(call) as answer:
            departure = Departure(served.thread, answer)
            try:
                await departure.begin(prompt)
                while outgoing := await departure.next():
                    try:
                        piece = await loop.run_in_executor(self._copying, departure.to_host, outgoing)
                    finally:
                        departure.drop(outgoing)  # where nobody came to it
                    yield piece
                    del piece
            finally:
                departure.end()

    def close(self) -> None:
        self._copying.shutdown(wait=False, cancel_futures=True)


class Departure:
    """One prompt's pages, on their way from the engine's thread to the event loop. begin, next ..., and end always."""

    def __init__(self, thread: EngineThread, answer: Answer):
        self._thread, self._answer = thread, answer
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Outgoing | JaxserveError | None] = asyncio.Queue()
        self._watching: asyncio.Task[None] | None = None
        self._over = False

    async def begin(self, prompt: Prompt) -> None:
        request = self._answer.prepared.request
        self._watching = asyncio.create_task(self._watch())
        export = self._thread.call(
            lambda engine: engine.transfers.export(request, prompt.start, prompt.page_size, self._deliver)
        )
        await asyncio.wrap_future(export)

    async def next(self) -> Outgoing | None:
        """None when there are no more. A JaxserveError when the request has failed, behind what came before."""
        arrived = await self._arrived.get()
        if isinstance(arrived, JaxserveError):
            raise arrived
        return arrived

    def to_host(self, outgoing: Outgoing) -> Piece:
        """On a thread that may wait."""
        try:
            return outgoing.to_host()
        finally:
            self._advance()

    def end(self) -> None:
        """Nothing more is wanted; its request, whoever ends that, ends what still reads."""
        self._over = True
        if self._watching:
            self._watching.cancel()
        while not self._arrived.empty():
            arrived = self._arrived.get_nowait()
            if isinstance(arrived, Outgoing):
                self.drop(arrived)

    def drop(self, outgoing: Outgoing) -> None:
        """See Outgoing.drop."""
        outgoing.drop()
        self._advance()

    async def _watch(self) -> None:
        """A request that ends in a step without output, or with an error, is noticed as well."""
        try:
            await self._answer.whole()
            self._advance()
        except JaxserveError as error:
            self._arrived.put_nowait(error)

    def _advance(self) -> None:
        self._thread.call(lambda engine: engine.transfers.advance())

    def _deliver(self, outgoing: Outgoing | None) -> None:
        """On the engine's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, outgoing)

    def _take(self, outgoing: Outgoing | None) -> None:
        if not self._over:
            self._arrived.put_nowait(outgoing)
        elif outgoing:
            self.drop(outgoing)
