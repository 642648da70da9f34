"""What a client hears of its request, and the box where it lies until it is read."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.completion import Completion, TextDelta
from jaxserve.engine.plan import Logprob
from jaxserve.errors import JaxserveError, SlowConsumerError


@dataclass(frozen=True, slots=True)
class Started:
    """The first: the prompt was computed, or a part of it whose log-probabilities were asked
    for."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of the prompt's tokens from position `start` on."""

    start: int
    entries: list[Logprob]


@dataclass(slots=True)
class Update:
    """What became final of one choice since the reader looked last."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] | None = None

    def add(self, piece: TextDelta) -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        if piece.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *piece.logprobs]


@dataclass(frozen=True, slots=True)
class Done:
    """The last. padding_share: of what the engine computed while the request was there; bucket: of
    its last step.
    """

    completions: tuple[Completion, ...]
    padding_share: float
    bucket: str


def _own(entries: Sequence[Logprob] | None) -> list[Logprob] | None:
    return None if entries is None else list(entries)


News = Started | PromptScores | Update | Done


class Outbox:
    """News of one request for one reader. Writing never waits; updates of a choice that nobody read
    yet become one.

    Lives on the event loop. SlowConsumerError, to the writer, when more than `max_tokens` lie
    unread.
    """

    def __init__(self, max_tokens: int):
        self._max_tokens = max_tokens
        self._first: list[News] = []
        self._updates: dict[int, Update] = {}
        self._unread = 0
        self._done: Done | None = None
        self._error: JaxserveError | None = None
        self._reader: asyncio.Future[None] | None = None  # waits for something to read

    def put(self, news: Started | PromptScores) -> None:
        self._first.append(news)
        self._wake()

    def update(self, index: int, piece: TextDelta) -> None:
        self._unread += len(piece.token_ids)
        if self._unread > self._max_tokens:
            raise SlowConsumerError(
                f"{self._unread} tokens lie unread; the limit is {self._max_tokens} (read "
                f"faster, or raise "
                "--max-unread-tokens)"
            )
        if index in self._updates:
            self._updates[index].add(piece)
        else:
            self._updates[index] = Update(
                index, piece.text, list(piece.token_ids), _own(piece.logprobs)
            )
        self._wake()

    def finish(self, done: Done) -> None:
        self._done = done
        self._wake()

    def fail(self, error: JaxserveError) -> None:
        """What lies unread is still read before it."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> list[News]:
        """All that is there, at least one; the error that ended the request when there is nothing
        else.
        """
        while not (self._first or self._updates or self._done or self._error):
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        news: list[News] = [*self._first, *self._updates.values()]
        if self._done:
            news.append(self._done)
        elif not news and self._error:
            raise self._error
        if self._first:
            self._first = []
        self._updates, self._unread = {}, 0
        return news
