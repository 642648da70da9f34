"""The answer to one admitted request: from the engine's events to what its client reads."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import fields
from typing import Protocol

from jaxserve.chat import TemplateOptions
from jaxserve.completion import Completion
from jaxserve.engine.engine_thread import ComputeTotals
from jaxserve.engine.events import Times, TokenEvent
from jaxserve.errors import JaxserveError, SlowConsumerError
from jaxserve.open_choices import OpenChoices
from jaxserve.prompts import Prepared
from jaxserve.server.core.answer_events import AnswerEvent, Done, Outbox, PromptScores, Started
from jaxserve.server.core.ignored_names import IgnoredField
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.internal_errors import mask_internal_error
from jaxserve.tokenizer import Tokenizer

# Options of a conversation, which the chat template may not heed.
OPTIONS = frozenset(field.name for field in fields(TemplateOptions))


class Engine(Protocol):
    """The part of the engine thread that an answer uses. Both methods return at once."""

    def stop(self, request_id: str, index: int) -> None: ...
    def abort(self, request_id: str) -> None: ...


class Answer:
    """One request from its submission to its end. Lives on the event loop.

    Iterate over it once: Started, then updates, and Done at the end, or a JaxserveError. Use it in
    a `with`: leaving early aborts the request.

    Args:
        id: Request id that the client knows.
        totals: Tokens that the device has computed so far.
        on_end: Function called once, with the error or None.
    """

    def __init__(
        self,
        id: str,
        incoming: IncomingRequest,
        prepared: Prepared,
        tokenizer: Tokenizer,
        engine: Engine,
        outbox: Outbox,
        totals: ComputeTotals,
        on_end: Callable[["Answer", JaxserveError | None], None],
    ):
        params = prepared.request.params
        assert params.seed is not None, "the service draws a seed before it makes the answer"
        self.id = id
        self.incoming = incoming
        self.prepared = prepared
        self.times: Times | None = None  # of the first choice that began
        self.completions: list[Completion] = []
        self.error: JaxserveError | None = None
        self.finished = False
        self.begun = asyncio.Event()  # set once the request has a row
        self.cached_tokens: int | None = None  # of the prompt, once the request has a row
        self.exported = False  # all pages of a prefill request have left this server
        arrived = prepared.request.since
        self.submitted = time.monotonic() if arrived is None else arrived
        self.last_tokens_at: dict[int, float] = {}  # by choice, monotonic seconds
        self.received: Counter[int] = Counter()  # tokens by choice
        self._engine = engine
        self._outbox = outbox
        self._totals_before = totals
        self._on_end = on_end
        self._unread: deque[AnswerEvent] = deque()
        self._read_to_end = False
        self._next_score = 1  # position of the next prompt token whose log-probability comes
        self._choices = OpenChoices(
            prepared, params.seed, tokenizer, engine.stop, prepared.reading.spelled
        )

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prepared.request.prompt)

    @property
    def ignored(self) -> list[IgnoredField]:
        """Fields of the request that were accepted and changed nothing."""
        unread = [IgnoredField(name, name in OPTIONS) for name in self.prepared.unread]
        return [*self.incoming.ignored, *unread]

    @property
    def started(self) -> bool:
        """True once the engine has returned anything for this request."""
        return self.times is not None

    @property
    def running_choices(self) -> list[int]:
        """Choices that have a token and have not ended."""
        ended = {completion.index for completion in self.completions}
        return [index for index in self.received if index not in ended]

    @property
    def unbegun_choices(self) -> int:
        """Number of choices that have no token and have not ended."""
        begun = self.received.keys() | {completion.index for completion in self.completions}
        return self.prepared.request.params.n - len(begun)

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of a choice; None is what the context leaves."""
        return self.prepared.request.params.max_tokens

    @property
    def prefilled(self) -> bool:
        """True once a decode server got what it asked for: the prompt computed, or all its pages.

        The request itself may still run.
        """
        return self.incoming.prefill and (self.exported or bool(self.completions))

    # ---- the reader's side

    def __aiter__(self) -> "Answer":
        return self

    async def __anext__(self) -> AnswerEvent:
        if self._read_to_end:
            raise StopAsyncIteration
        if not self._unread:
            self._unread.extend(await self._outbox.take())
        event = self._unread.popleft()
        self._read_to_end = isinstance(event, Done)
        return event

    async def whole(self) -> Done:
        """Wait for the end and return the last event; raises the JaxserveError that ended it."""
        async for event in self:
            if isinstance(event, Done):
                return event
        raise AssertionError("an answer ends with Done or an error")

    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SlowConsumerError):
            self.fail(error)
        else:
            self.close()

    def close(self) -> None:
        """Abort what still runs, since nobody waits for it any more."""
        if not self.finished:
            self._engine.abort(self.prepared.request.id)
            self._end(None)

    # ---- the engine's side

    def fail(self, error: JaxserveError) -> None:
        """End with an error and abort the request in the engine."""
        if not self.finished:
            self._engine.abort(self.prepared.request.id)
            self._outbox.fail(error)
            self._end(error)

    def begin(self, cached_tokens: int) -> None:
        """Take note that the request has got a row, and what is cached of its prompt."""
        self.cached_tokens = cached_tokens
        self.begun.set()

    def take(self, event: TokenEvent, totals: ComputeTotals) -> int:
        """Take in an event of the engine; return the number of tokens that the client gets."""
        if self.finished or event.index not in self._choices:
            return 0
        self._begin(event)
        piece, completion = self._choices.take(event)
        try:
            if piece.text or piece.token_ids:
                self._outbox.update(event.index, piece)
        except JaxserveError as error:
            self.fail(error)
            return 0
        if piece.prompt_logprobs:
            self._outbox.put(PromptScores(self._next_score, list(piece.prompt_logprobs)))
            self._next_score += len(piece.prompt_logprobs)
        if completion:
            self._finish_choice(completion, totals)
        return len(piece.token_ids)

    def _begin(self, event: TokenEvent) -> None:
        """Put Started before the first event that has anything for the client.

        Log-probabilities of the prompt come before the first token, and so before its times.
        """
        if event.finish and event.finish.error:
            return
        was_started = self.started
        if event.times:
            self.times = event.times
        elif self.times is None and event.prompt_logprobs:
            self.times = Times()
        if self.times and not was_started:
            self.begin(self.times.cached)
            self._outbox.put(Started(self.prompt_tokens, self.times.cached))

    def _finish_choice(self, completion: Completion, totals: ComputeTotals) -> None:
        if completion.error:
            return self.fail(mask_internal_error(completion.error))
        self.completions.append(completion)
        if self._choices:
            return
        before = self._totals_before
        computed = totals.computed_tokens - before.computed_tokens
        live = totals.live_tokens - before.live_tokens
        padding_share = max(0.0, 1 - live / computed) if computed else 0.0
        self.completions.sort(key=lambda completion: completion.index)
        self._outbox.finish(Done(tuple(self.completions), padding_share, totals.bucket))
        self._end(None)

    def _end(self, error: JaxserveError | None) -> None:
        self.finished = True
        self.error = error
        self._on_end(self, error)
