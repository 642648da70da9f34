"""Write an answer as the events of a response, and as the response itself."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

from jaxserve.chat.answers import Arguments, Call, Content, Part, Reasoning
from jaxserve.engine.events import FinishReason
from jaxserve.errors import JaxserveError
from jaxserve.server.core.answer import Answer
from jaxserve.server.http.agents.responses.items import (
    CustomItem,
    FunctionItem,
    MessageItem,
    OpenItem,
    ReasoningItem,
)
from jaxserve.server.http.agents.responses.response import (
    CANCELLED,
    COMPLETED,
    INCOMPLETE,
    Response,
    failed,
    finished,
)
from jaxserve.server.http.agents.responses.tools import Origin
from jaxserve.server.http.agents.turns import Ended, Event

# State of a response by the reason of its end; others are complete.
STATES: Mapping[str, str] = {FinishReason.LENGTH: INCOMPLETE, FinishReason.ABORT: CANCELLED}


class ResponseWriter:
    """A `TurnWriter` of responses.

    Args:
        response: Response before its answer begins.
        origins: Tools of the request, by the names of their functions.
        seal: Function that encrypts thoughts; None where the client does not ask for it.
        keep: Function that takes the response at its end.
    """

    def __init__(
        self,
        response: Response,
        origins: Mapping[str, Origin],
        seal: Callable[[str], str] | None,
        keep: Callable[[Response], None],
    ):
        self._response = response
        self._origins = origins
        self._seal = seal
        self._keep = keep
        self._numbers = count()
        self._open: OpenItem | None = None
        self._output: list[Mapping[str, Any]] = []

    def opening(self, answer: Answer) -> Iterable[Event]:
        for type in ("response.created", "response.in_progress"):
            yield self._event(type, response=self._response)

    def part(self, part: Part) -> Iterable[Event]:
        match part:
            case Content():
                yield from self._text(MessageItem, part.text, MessageItem)
            case Reasoning():
                yield from self._text(ReasoningItem, part.text, self._new_thought)
            case Call():
                origin = self._origins[part.name]
                kind = CustomItem if origin.is_custom else FunctionItem
                yield from self._begin(kind(part, origin))
            case Arguments():
                assert self._open
                yield from self._told(self._open.add(part.text))

    def end(self, ended: Ended) -> Iterable[Event]:
        status = STATES.get(ended.completion.finish_reason, COMPLETED)
        is_whole = status == COMPLETED
        if not (self._output or self._open):
            yield from self._begin(MessageItem())  # clients expect one
        yield from self._close(COMPLETED if is_whole else INCOMPLETE)
        self._response = finished(self._response, self._output, status, ended.usage)
        self._keep(self._response)
        # There is no event of a response that was cancelled.
        type = "response.completed" if is_whole else "response.incomplete"
        yield self._event(type, response=self._response)

    def failure(self, error: JaxserveError) -> Iterable[Event]:
        response = failed(self._response, self._output, error)
        yield self._event("response.failed", response=response)

    def whole(self) -> Response:
        return self._response

    # ---- items

    def _new_thought(self) -> ReasoningItem:
        return ReasoningItem(self._seal)

    def _text(
        self, kind: type[OpenItem], text: str, new: Callable[[], OpenItem]
    ) -> Iterator[Event]:
        """Tell a text, in a new item unless one of its kind is open."""
        if not isinstance(self._open, kind):
            yield from self._begin(new())
        assert self._open
        yield from self._told(self._open.add(text))

    def _begin(self, item: OpenItem) -> Iterator[Event]:
        """Close the item that is open, and open another one."""
        yield from self._close(COMPLETED)
        self._open = item
        yield self._event("response.output_item.added", **self._place(), item=item.begun())
        yield from self._told(item.opening())

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        yield from self._told(self._open.closing())
        item = self._open.whole(status)
        yield self._event("response.output_item.done", **self._place(), item=item)
        self._output.append(item)
        self._open = None

    def _told(self, told: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[Event]:
        assert self._open
        for type, fields in told:
            yield self._event(type, item_id=self._open.id, **self._place(), **fields)

    def _place(self) -> dict[str, int]:
        return {"output_index": len(self._output)}

    def _event(self, type: str, **fields: Any) -> Event:
        return type, {"type": type, "sequence_number": next(self._numbers)} | fields
