"""Answer: one request that was admitted, from the engine's events to the news that its client
reads.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from jaxserve.completion import Assembler, Completion
from jaxserve.engine.plan import Times, TokenEvent
from jaxserve.errors import JaxserveError
from jaxserve.prompts import Prepared
from jaxserve.server.core.answer_events import AnswerEvent, Done, Outbox, PromptScores, Started
from jaxserve.server.core.engine_thread import ComputeTotals
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.internal_errors import mask_internal_error
from jaxserve.tokenizer import Tokenizer


class Engine(Protocol):
    """What an answer asks of the engine's thread."""

    def stop(self, request_id: str, index: int) -> None: ...
    def abort(self, request_id: str) -> None: ...


class Answer:
    """Iterate over it once: Started, then updates, Done at the end; or JaxserveError. Lives on the
    event loop.

    Use it in a `with`: leaving early aborts the request. ended: called once, with None or the
    error.
    """

    def __init__(
        self,
        id: str,
        call: IncomingRequest,
        prepared: Prepared,
        tokenizer: Tokenizer,
        engine: Engine,
        outbox: Outbox,
        before: ComputeTotals,
        ended: Callable[["Answer", JaxserveError | None], None],
    ):
        params = prepared.request.params
        assert params.seed is not None, "the seed is drawn before"
        self.id, self.call, self.prepared = id, call, prepared
        self.times: Times | None = None  # of the first choice that began
        self.completions: list[Completion] = []
        self.error: JaxserveError | None = None
        self._engine, self._outbox, self._before, self._tell = engine, outbox, before, ended
        self._unread: deque[AnswerEvent] = deque()
        self._told_all = False
        self._scored = 1  # position of the next prompt token whose log-probability comes
        self._assemblers = {
            index: Assembler(
                prepared.request,
                prepared.text,
                index,
                params.seed,
                tokenizer,
                prepared.reading.spelled,
            )
            for index in range(params.n)
        }
        self.finished = False
        self.exported = False  # all pages of a prefill have
        since = prepared.request.since
        self.submitted = time.monotonic() if since is None else since
        self.newest: dict[int, float] = {}  # when a choice last had tokens

    @property
    def prompt_tokens(self) -> int:
        return len(self.prepared.request.prompt)

    @property
    def started(self) -> bool:
        return self.times is not None

    @property
    def prefilled(self) -> bool:
        """Its prompt was computed, or all its pages have left, whether it has ended or not."""
        return self.call.prefill and (self.exported or bool(self.completions))

    def __aiter__(self) -> "Answer":
        return self

    async def __anext__(self) -> AnswerEvent:
        if self._told_all:
            raise StopAsyncIteration
        if not self._unread:
            self._unread.extend(await self._outbox.take())
        news = self._unread.popleft()
        self._told_all = isinstance(news, Done)
        return news

    async def whole(self) -> Done:
        """The last of the news; JaxserveError where there is none."""
        async for news in self:
            if isinstance(news, Done):
                return news
        raise AssertionError("an answer ends with Done or an error")

    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nobody reads any more: abort what still runs."""
        if not self.finished:
            self._engine.abort(self.prepared.request.id)
            self._end(None)

    def fail(self, error: JaxserveError) -> None:
        """End with an error; the engine is told."""
        if not self.finished:
            self._engine.abort(self.prepared.request.id)
            self._outbox.fail(error)
            self._end(error)

    def take(self, event: TokenEvent, totals: ComputeTotals) -> int:
        """Take in an event of the engine; returns how many tokens became the client's."""
        assembler = self._assemblers.get(event.index)
        if assembler is None or self.finished:
            return 0
        self._begin(event)
        piece = assembler.push(event)
        try:
            if piece.text or piece.token_ids:
                self._outbox.update(event.index, piece)
        except JaxserveError as error:
            self.fail(error)
            return 0
        if piece.prompt_logprobs:
            self._outbox.put(PromptScores(self._scored, list(piece.prompt_logprobs)))
            self._scored += len(piece.prompt_logprobs)
        if event.finish:
            self._finish_choice(assembler, event, totals)
        elif assembler.stopped:
            self._engine.stop(event.request_id, event.index)
        return len(piece.token_ids)

    def _begin(self, event: TokenEvent) -> None:
        """The prompt's log-probabilities come before the first token, and so before its times."""
        begun = self.started
        self.times = event.times or self.times or (Times() if event.prompt_logprobs else None)
        if self.times and not begun:
            self._outbox.put(Started(self.prompt_tokens, self.times.cached))

    def _finish_choice(
        self, assembler: Assembler, event: TokenEvent, totals: ComputeTotals
    ) -> None:
        assert event.finish
        if (
            event.finish.error and not assembler.stopped
        ):  # what comes behind a stop string is nobody's
            return self.fail(mask_internal_error(event.finish.error))
        self.completions.append(assembler.completion(event))
        del self._assemblers[event.index]
        if not self._assemblers:
            computed = totals.computed_tokens - self._before.computed_tokens
            live = totals.live_tokens - self._before.live_tokens
            padding = max(0.0, 1 - live / computed) if computed else 0.0
            self.completions.sort(key=lambda completion: completion.index)
            self._outbox.finish(Done(tuple(self.completions), padding, totals.bucket))
            self._end(None)

    def _end(self, error: JaxserveError | None) -> None:
        self.finished, self.error = True, error
        self._tell(self, error)
