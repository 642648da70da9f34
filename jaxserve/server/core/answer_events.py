"""Events of an answer as its client reads them, and the outbox that holds them until then."""

import asyncio
from dataclasses import dataclass, field

from jaxserve.completion import Completion, TextDelta
from jaxserve.engine.events import Logprob
from jaxserve.errors import JaxserveError, SlowConsumerError


@dataclass(frozen=True, slots=True)
class Started:
    """The first event of an answer: the engine has begun to return results for the prompt.

    It comes with the first token, or with the first log-probabilities of the prompt where the
    client asked for these.
    """

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of the prompt's tokens from position `start` on."""

    start: int
    entries: list[Logprob]


@dataclass(slots=True)
class Update:
    """New text and tokens of one choice since the client last read."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] | None = None  # one for each token; None: the client did not ask

    def add(self, piece: TextDelta) -> None:
        """Append what the engine produced after this update."""
        self.text += piece.text
        self.token_ids += piece.token_ids
        if piece.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *piece.logprobs]


@dataclass(frozen=True, slots=True)
class Done:
    """The last event of an answer."""

    completions: tuple[Completion, ...]
    # Share of padding among the tokens that the engine computed, for all requests, between
    # admission and end of this one, 0 to 1.
    padding_share: float
    bucket: str  # compiled step of the last output


AnswerEvent = Started | PromptScores | Update | Done


class Outbox:
    """Unread events of one request for one reader. Lives on the event loop.

    Writing never waits. Unread updates of the same choice are merged into one, so that a slow
    reader gets fewer and larger messages.

    Args:
        max_tokens: Number of unread tokens beyond which `update` raises.
    """

    def __init__(self, max_tokens: int):
        self._max_tokens = max_tokens
        self._first: list[AnswerEvent] = []  # events that precede all updates
        self._updates: dict[int, Update] = {}  # by choice
        self._unread = 0  # tokens
        self._done: Done | None = None
        self._error: JaxserveError | None = None
        self._reader: asyncio.Future[None] | None = None  # of a reader that waits in `take`

    def put(self, event: Started | PromptScores) -> None:
        """Add an event that precedes the text of all choices."""
        self._first.append(event)
        self._wake()

    def update(self, index: int, piece: TextDelta) -> None:
        """Add new text and tokens of a choice; SlowConsumerError when too many lie unread."""
        self._unread += len(piece.token_ids)
        if self._unread > self._max_tokens:
            raise SlowConsumerError(
                f"{self._unread} tokens lie unread; the limit is {self._max_tokens} (read faster, "
                f"or raise --max-unread-tokens)"
            )
        if index in self._updates:
            self._updates[index].add(piece)
        else:
            logprobs = None if piece.logprobs is None else list(piece.logprobs)
            self._updates[index] = Update(index, piece.text, list(piece.token_ids), logprobs)
        self._wake()

    def finish(self, done: Done) -> None:
        """Add the last event."""
        self._done = done
        self._wake()

    def fail(self, error: JaxserveError) -> None:
        """End with an error, which the reader gets after the events that lie unread."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> list[AnswerEvent]:
        """Wait for unread events and return all of them, at least one.

        Raises the error that ended the request once no events are left.
        """
        while not (self._first or self._updates or self._done or self._error):
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        events: list[AnswerEvent] = [*self._first, *self._updates.values()]
        if self._done:
            events.append(self._done)
        elif not events and self._error:
            raise self._error
        self._first = []
        self._updates = {}
        self._unread = 0
        return events
