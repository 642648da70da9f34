"""The way of one request of an agent: a conversation in, the assistant's next turn out."""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.chat.answers import AnswerParser, Part, Reasoning
from jaxserve.completion import Completion
from jaxserve.errors import JaxserveError, RequestError
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.answer_events import AnswerEvent, Done, Update
from jaxserve.server.core.incoming_request import IncomingRequest, trace_of
from jaxserve.server.core.internal_errors import mask_internal_error
from jaxserve.server.core.service import Service
from jaxserve.server.http.agents.listed import Notes
from jaxserve.server.http.calls import check_model
from jaxserve.server.http.ignored import note_also
from jaxserve.server.http.json import MEDIA_TYPE, dumps
from jaxserve.server.http.replies import id_header
from jaxserve.server.http.streams import (
    KEEP_ALIVE,
    EventStream,
    cancel,
    merged,
    until_begun,
    while_connected,
    with_keep_alive,
    without_silence,
)
from jaxserve.server.serving_state import ServingState

MESSAGES = "messages"  # path of the conversation that a request becomes
MESSAGE = re.compile(rf"{MESSAGES}\[(\d+)\]")

Event = tuple[str, dict[str, Any]]  # name and data of a server-sent event


class Usage(NamedTuple):
    """Tokens of a prompt and its answer.

    `cached` tokens of the prompt were in the cache. `thought` is how many tokens the tokenizer
    makes of the text of the thoughts, which are among those `generated`.
    """

    prompt: int
    cached: int
    generated: int
    thought: int


class Ended(NamedTuple):
    """End of an answer; `called` says that it calls functions."""

    completion: Completion
    called: bool
    usage: Usage


class TurnWriter(Protocol):
    """Writer of one answer in the form of an API, as the events of a stream or as a whole."""

    def opening(self, answer: Answer) -> Iterable[Event]:
        """Return the events before the first part."""
        ...

    def part(self, part: Part) -> Iterable[Event]:
        """Return the events that tell a part of the answer."""
        ...

    def end(self, ended: Ended) -> Iterable[Event]:
        """Return the last events."""
        ...

    def failure(self, error: JaxserveError) -> Iterable[Event]:
        """Return the events of an error that ends the stream."""
        ...

    def whole(self) -> Mapping[str, Any]:
        """Return the reply to a request that does not stream, once `end` was called."""
        ...


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A request of an agent in the terms of the service.

    Attributes:
        call: Request, whose prompt is a conversation.
        model: Name of the model that is asked for; None for any.
        new_writer: Function that returns the writer of the answer.
        stream: Whether the answer is streamed.
        names: Paths in the body of what has another name in the service.
        paths: Path in the body of each message of the conversation.
        notes: What the request has without effect.
        headers: Further headers of the reply.
    """

    call: IncomingRequest
    model: str | None
    new_writer: Callable[[], TurnWriter]
    stream: bool
    names: Mapping[str, str]
    paths: Sequence[str]
    notes: Notes
    headers: Mapping[str, str] = field(default_factory=dict)


async def reply(request: Request, served: ServingState, turn: Turn) -> Response:
    """Answer a request as a whole or as a stream; JaxserveError before anything is sent."""
    check_model(turn.model, served)
    call = replace(
        turn.call,
        client=request.state.client,
        trace=trace_of(request.headers.items()),
        ignored=tuple(turn.notes.fields.values()),
    )
    note_also(request, list(turn.notes.fields))
    async with AsyncExitStack() as stack:
        work = _stream if turn.stream else _whole
        return await while_connected(request, work(request, served.service, turn, call, stack))


async def count_tokens(
    request: Request,
    served: ServingState,
    call: IncomingRequest,
    model: str | None,
    names: Mapping[str, str],
    paths: Sequence[str],
    notes: Notes,
) -> int:
    """Return the number of tokens of the prompt that a request becomes; arguments as of Turn."""
    check_model(model, served)
    note_also(request, list(notes.fields))
    with names_of_body(names, paths):
        rendered = await served.service.tokenize(
            call.prompt, MESSAGES, tools=call.tools, options=call.options
        )
    note_also(request, [names.get(name, name) for name in rendered.unread])
    return len(rendered.token_ids)


async def _whole(
    request: Request, service: Service, turn: Turn, call: IncomingRequest, stack: AsyncExitStack
) -> Response:
    answer = await _admit(request, service, turn, call, stack)
    teller = _Teller(service, answer, turn.new_writer())
    async for event in answer:
        async for _ in teller.tell(event):
            pass
    content = dumps(teller.writer.whole())
    return Response(content, headers=_headers(turn), media_type=MEDIA_TYPE)


async def _stream(
    request: Request, service: Service, turn: Turn, call: IncomingRequest, stack: AsyncExitStack
) -> Response:
    answer = await _admit(request, service, turn, call, stack)
    events = await stack.enter_async_context(aclosing(merged([answer])))
    first = asyncio.ensure_future(anext(events))
    stack.push_async_callback(cancel, [first])
    # An error before the response begins still sets its status.
    await until_begun(first, [answer])
    if first.done():
        first.result()
    teller = _Teller(service, answer, turn.new_writer())
    stream = without_silence(teller.frames(with_keep_alive(first, events)))
    # From here on the stream owns the answer: the stack must not end it when this returns.
    return EventStream(stream, stack.pop_all(), _headers(turn))


def _headers(turn: Turn) -> dict[str, str]:
    return {**id_header(turn.call.request_id), **turn.headers}


async def _admit(
    request: Request, service: Service, turn: Turn, call: IncomingRequest, stack: AsyncExitStack
) -> Answer:
    """Admit the request or raise; the answer ends with the stack."""
    with names_of_body(turn.names, turn.paths):
        answer = stack.enter_context(await service.answer(call))
    note_also(request, [turn.names.get(name, name) for name in answer.prepared.unread])
    return answer


@contextmanager
def names_of_body(names: Mapping[str, str], paths: Sequence[str]) -> Iterator[None]:
    """Make RequestErrors of the block name fields and messages as the body does."""
    try:
        yield
    except RequestError as error:
        field = names.get(error.field, error.field)
        if match := MESSAGE.match(field):
            index = int(match[1])
            field = (paths[index] if index < len(paths) else MESSAGES) + field[match.end() :]
        if field == error.field:
            raise
        error.rename(field)
        raise


class _Teller:
    """Teller of an answer in the form of an API."""

    def __init__(self, service: Service, answer: Answer, writer: TurnWriter):
        self.writer = writer
        self._service = service
        self._answer = answer
        self._parser = AnswerParser(answer.prepared.reading)
        self._thoughts: list[str] = []

    async def tell(self, event: AnswerEvent) -> AsyncGenerator[list[Event]]:
        """Yield the events that tell what is new of the answer, as soon as they are known."""
        match event:
            case Update():
                yield self._parts(self._parser.feed(event.text))
            case Done():
                yield self._parts(self._parser.end())
                (completion,) = event.completions
                usage = await self._usage()
                yield list(self.writer.end(Ended(completion, self._parser.called, usage)))
            case _:
                yield []

    def _parts(self, parts: Iterable[Part]) -> list[Event]:
        told = list[Event]()
        for part in parts:
            if isinstance(part, Reasoning):
                self._thoughts.append(part.text)
            told += self.writer.part(part)
        return told

    async def _usage(self) -> Usage:
        generated = self._answer.received.total()
        thought = await self._service.count_tokens("".join(self._thoughts))
        cached = self._answer.cached_tokens or 0
        return Usage(self._answer.prompt_tokens, cached, generated, min(thought, generated))

    async def frames(
        self, events: AsyncGenerator[tuple[int, AnswerEvent] | None]
    ) -> AsyncGenerator[bytes]:
        """Yield bytes for each event, up to the last one or to an error; some are empty.

        Args:
            events: Those of the answer; None stands for a comment that keeps the connection open.
        """
        try:
            yield _frames(self.writer.opening(self._answer))
            async with aclosing(events):
                async for event in events:
                    if event is None:
                        yield KEEP_ALIVE
                        continue
                    async for told in self.tell(event[1]):
                        yield _frames(told)
        except Exception as error:
            # The status was sent long ago, so an error can only be an event of the stream.
            yield _frames(self.writer.failure(mask_internal_error(error)))


def _frames(events: Iterable[Event]) -> bytes:
    """Render server-sent events, each with its name."""
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (name.encode(), dumps(data)) for name, data in events
    )
