"""Server-sent events: chunks of completions as they come, and the response that carries them."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from jaxserve.server.core.answer_events import AnswerEvent
from jaxserve.server.core.internal_errors import mask_internal_error
from jaxserve.server.http.errors import error_body
from jaxserve.server.http.json import dumps
from jaxserve.server.http.replies import Choice, Meter, Writer
from jaxserve.server.http.types import StreamOptions

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}  # for proxies, which would collect the events
log = logging.getLogger(__name__)


class Chunks:
    """The events of one stream. head: what every chunk has."""

    def __init__(
        self, head: Mapping[str, Any], writer: Writer, meter: Meter, options: StreamOptions
    ):
        self._head, self._writer, self._meter, self._options = head, writer, meter, options

    async def events(
        self, first: tuple[int, AnswerEvent], rest: AsyncIterator[tuple[int, AnswerEvent]]
    ) -> AsyncGenerator[bytes]:
        """From the first news to [DONE], or to an error."""
        try:
            yield self._frames(self._writer.opening()) + self._tell(*first)
            async for prompt, news in rest:
                if told := self._tell(prompt, news):
                    yield told
            yield self._usage() + DONE
        except Exception as error:
            yield _frame(error_body(mask_internal_error(error)))

    def _tell(self, prompt: int, news: AnswerEvent) -> bytes:
        self._meter.see(prompt, news)
        return self._frames(self._writer.pieces(prompt, news))

    def _frames(self, choices: Iterable[Choice]) -> bytes:
        """An event for each of the choices."""
        return b"".join(
            _frame({**self._head, "choices": [choice], **self._so_far(choice)})
            for choice in choices
        )

    def _so_far(self, choice: Choice) -> dict[str, Any]:
        if self._options.continuous_usage_stats:
            return {"usage": self._meter.of_choice(choice["index"])}
        return {"usage": None} if self._options.include_usage else {}

    def _usage(self) -> bytes:
        if not self._options.include_usage:
            return b""
        return _frame({**self._head, "choices": [], "usage": self._meter.total()})


def _frame(value: Mapping[str, Any]) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


class EventStream(StreamingResponse):
    """Closes the events and what is `owned`, the answers, however it ends. seconds: for a client to
    take a piece.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        owned: AsyncExitStack,
        seconds: float,
        headers: Mapping[str, str],
    ):
        super().__init__(events, headers={**HEADERS, **headers})
        self._events, self._owned, self._seconds = events, owned, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._owned, aclosing(self._events):
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """A client that reads too slowly loses its stream; the engine never waits for it."""

        async def bounded(message: Message) -> None:
            async with asyncio.timeout(self._seconds):
                await send(message)

        try:
            await super().stream_response(bounded)
        except TimeoutError:  # returning early breaks the connection off
            log.info(
                "a stream ends: nothing was read for %g s (--slow-client-seconds)", self._seconds
            )
