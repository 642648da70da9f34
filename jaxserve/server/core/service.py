"""Service: what the server does, whatever the protocol. gRPC and HTTP are facades over one object
of this class.
"""

import asyncio
import itertools
import secrets
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Protocol

from jaxserve.chat import Rendered, Tools
from jaxserve.engine.plan import TokenEvent
from jaxserve.errors import (
    DeadlineError,
    JaxserveError,
    QueueFullError,
    RequestError,
    RequestIdInUseError,
    RoleError,
)
from jaxserve.prompts import Prepared, Prompt, Prompts, is_conversation
from jaxserve.request import Request, SamplingParams
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.answer_events import Outbox
from jaxserve.server.core.engine_thread import ComputeTotals, EngineThread, Loads, StepReport
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.internal_errors import mask_internal_error
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.slow_clients import SlowClients
from jaxserve.server.core.ttft_estimate import TTFTEstimate
from jaxserve.structure import Grammar, Structure

MAX_ID_BYTES = 128
MAX_SALT_BYTES = 128
MAX_PRIORITY = 100
SLICE = 32  # events handled in one turn of the event loop: what else is due waits for no more
MAX_TOKENIZE_CALLS = 64  # calls of Tokenize and Detokenize that wait for their turn
MAX_UNCOMPILED = 64  # requests whose grammars wait for their turn
SHORT = 2048  # letters or tokens that are encoded on the event loop


class RequestObserver(Protocol):
    """Who counts: the metrics, the log, the traces."""

    def refused(self, call: IncomingRequest, error: JaxserveError) -> None: ...
    def stepped(self, news: StepReport) -> None: ...
    def received(self, answer: Answer, tokens: int, first: bool, seconds: float) -> None: ...
    def ended(self, answer: Answer, error: JaxserveError | None) -> None: ...


class Handover(Protocol):
    """Who may have a prompt computed elsewhere."""

    async def prepare(self, request: Request) -> None:
        """Before it is submitted. JaxserveError when that has no use any more."""
        ...

    def close(self) -> None: ...


class Service:
    """Admits requests, hands them to the engine's thread and its news to them. Lives on the event
    loop.

    Nothing waits for a client here: what is not read lies in a bounded outbox.

    handover: of a decode server. for_servers: only prompts of decode servers are computed, and
    clients are refused.
    """

    def __init__(
        self,
        prompts: Prompts,
        thread: EngineThread,
        forecast: TTFTEstimate,
        limits: Limits,
        observers: tuple[RequestObserver, ...],
        handover: Handover | None = None,
        for_servers: bool = False,
    ):
        self.prompts, self.limits = prompts, limits
        self._handover, self._for_servers = handover, for_servers
        self.loads, self.totals = Loads(), ComputeTotals()
        self.slow_clients = SlowClients(limits.slow_client_seconds)
        self._thread, self._forecast, self._observers = thread, forecast, observers
        self._answers: dict[str, Answer] = {}  # by the engine's id
        self._requests: dict[
            str, Answer | None
        ] = {}  # by the client's id; None before it is submitted
        self._waiting: set[str] = set()  # those of them without a first token
        self._aborted: set[str] = (
            set()
        )  # those of them that were aborted while they were tokenized, or handed over
        self._handed_over: dict[
            str, asyncio.Task[None]
        ] = {}  # those whose prompts are computed elsewhere
        self._tokens_away = 0  # of these prompts
        self._failure: JaxserveError | None = None
        self._numbers = itertools.count(1)
        self._timers: dict[Answer, asyncio.TimerHandle] = {}
        self._events: deque[tuple[TokenEvent, ComputeTotals, float]] = deque()
        self._tokenizing = ThreadPoolExecutor(2, "tokenize")
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self._beside = ThreadPoolExecutor(
            1, "beside"
        )  # what must not hold up the admission of requests
        self._aside = self._uncompiled = 0

    # ---- requests

    async def answer(self, call: IncomingRequest, retries_itself: bool = False) -> Answer:
        """Admit a request. JaxserveError when it cannot run, or not now.

        comes_again: when the queue is full, the caller tries again by itself: that is no refusal.
        """
        try:
            return await self._admit(call)
        except JaxserveError as error:
            if not (retries_itself and isinstance(error, QueueFullError)):
                self._refuse(call, error)
            raise

    async def _admit(self, call: IncomingRequest) -> Answer:
        request_id = call.request_id or new_id()
        self._check(call, request_id)
        self._requests[request_id] = None
        self._waiting.add(request_id)
        try:
            prepared = self._checked(call, request_id, *await self._prepared(call))
            if self._handover:
                await self._prefilled(self._handover, request_id, prepared.request)
            return self._submit(call, request_id, prepared)
        except BaseException:
            self._forget(request_id)
            raise

    async def _prefilled(self, handover: Handover, request_id: str, request: Request) -> None:
        """Whoever aborts the request does not wait for the end of it."""
        if request_id in self._aborted or self._failure:
            return
        task = self._handed_over[request_id] = asyncio.create_task(handover.prepare(request))
        self._tokens_away += len(request.prompt)
        try:
            await asyncio.wait((task,))
        finally:
            del self._handed_over[request_id]
            self._tokens_away -= len(request.prompt)
            task.cancel()
        if not task.cancelled():
            task.result()

    def abort(self, request_id: str) -> bool:
        """End a request by its client's id; its answer finishes with reason abort. Whether it was
        in flight.
        """
        if request_id not in self._requests:
            return False
        if answer := self._requests[request_id]:
            self._thread.abort(answer.prepared.request.id)
        else:
            self._aborted.add(request_id)
        if task := self._handed_over.get(request_id):
            task.cancel()
        return True

    async def _prepared(
        self, call: IncomingRequest
    ) -> tuple[Rendered, SamplingParams, Grammar | None]:
        """The prompt as token ids, and what its answer has to follow, before the deadline."""
        try:
            left = None if call.deadline is None else call.deadline - time.monotonic()
            async with asyncio.timeout(left):
                rendered = await self.encode(call.prompt, call.prompt_field, call.tools)
                params = self.prompts.constrain(rendered, call.params)
                return (
                    rendered,
                    params,
                    await self._compiled(params.structure) if params.structure else None,
                )
        except TimeoutError:
            raise DeadlineError(
                "the deadline passed while the prompt was tokenized or the grammar compiled"
            ) from None

    async def _compiled(self, structure: Structure) -> Grammar:
        """Unknown grammars are compiled one after the other; who asks for one that is known does
        not wait for that.
        """
        loop, work = asyncio.get_running_loop(), partial(self.prompts.grammars.compile, structure)
        if self.prompts.grammars.knows(structure):
            return await loop.run_in_executor(self._tokenizing, work)
        if self._uncompiled >= MAX_UNCOMPILED:
            raise QueueFullError(f"{MAX_UNCOMPILED} grammars wait to be compiled already", 1.0)
        self._uncompiled += 1
        try:
            return await loop.run_in_executor(self._compiling, work)
        finally:
            self._uncompiled -= 1

    async def encode(self, prompt: Prompt, name: str, tools: Tools | None = None) -> Rendered:
        """Text and token ids of a prompt; long ones, and conversations, beside the event loop."""
        self._check_prompt_size(prompt, name)
        work = partial(self.prompts.encode, prompt, name, tools)
        if is_conversation(prompt) or len(prompt) > SHORT:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)
        return work()

    async def tokenize(self, prompt: Prompt, name: str) -> Rendered:
        """The same for its own sake; QueueFullError when many wait for that."""
        self._check_prompt_size(prompt, name)
        return await self._one_aside(partial(self.prompts.encode, prompt, name))

    async def detokenize(self, ids: list[int], name: str) -> str:
        return await self._one_aside(partial(self.prompts.decode, ids, name))

    async def _one_aside[T](self, work: "partial[T]") -> T:
        if self._aside >= MAX_TOKENIZE_CALLS:
            raise QueueFullError(f"{MAX_TOKENIZE_CALLS} calls wait to be tokenized already", 1.0)
        self._aside += 1
        try:
            return await self.run_in_background(work)
        finally:
            self._aside -= 1

    async def run_in_background[T](self, work: "partial[T]") -> T:
        """Run what takes long, and belongs to no request that waits, on a thread of its own."""
        return await asyncio.get_running_loop().run_in_executor(self._beside, work)

    def fail_all(self, error: JaxserveError) -> None:
        """End every request, and whatever is being tokenized or handed over."""
        self._failure = error
        for answer in list(self._answers.values()):
            answer.fail(error)
        for task in self._handed_over.values():
            task.cancel()

    def close(self) -> None:
        """Wait for what is being tokenized: a conversation's rendering has its own time limit."""
        if self._handover:
            self._handover.close()
        for executor in (self._tokenizing, self._compiling, self._beside):
            executor.shutdown(cancel_futures=True)

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of requests without a first token."""
        return self._tokens_ahead(MAX_PRIORITY)

    def _tokens_ahead(self, priority: int) -> int:
        """Those of requests that go before a new one of this priority."""
        waiting = [answer for id in self._waiting if (answer := self._requests[id])]
        return sum(a.prompt_tokens for a in waiting if a.prepared.request.priority <= priority)

    # ---- admission

    def _check(self, call: IncomingRequest, request_id: str) -> None:
        if self._for_servers and not call.prefill:
            raise RoleError(
                "this server computes prompts for others (--role prefill); ask one that decodes"
            )
        self.prompts.check_purpose(call.embed)
        _check_size("request_id", request_id, MAX_ID_BYTES)
        _check_size("cache_salt", call.cache_salt, MAX_SALT_BYTES)
        if abs(call.priority) > MAX_PRIORITY:
            raise RequestError(
                "priority",
                f"is {call.priority}; it must be between -{MAX_PRIORITY} and {MAX_PRIORITY}",
            )
        if request_id in self._requests:
            raise RequestIdInUseError(f"request_id {request_id!r} is in flight already")
        if len(self._waiting) >= self.limits.max_waiting_requests:
            raise self._full(
                f"{len(self._waiting)} requests wait already, as many as --max-waiting-requests "
                f"allows"
            )

    def _check_prompt_size(self, prompt: Prompt, name: str) -> None:
        size = (
            len(prompt.encode("utf-8", "replace"))
            if isinstance(prompt, str)
            else _content_size(prompt)
        )
        if size > self.limits.max_prompt_bytes:
            limit = self.limits.max_prompt_bytes
            raise RequestError(
                name, f"has {size} bytes of text; the limit is {limit} (--max-prompt-bytes)"
            )

    def _full(self, problem: str) -> QueueFullError:
        seconds = self._forecast.seconds_to_first_token(self.waiting_tokens, 0)
        return QueueFullError(problem, min(max(seconds, 0.1), 60.0))

    def _checked(
        self,
        call: IncomingRequest,
        request_id: str,
        rendered: Rendered,
        params: SamplingParams,
        grammar: Grammar | None,
    ) -> Prepared:
        """JaxserveError where it cannot run, or not now."""
        params = params if params.seed is not None else replace(params, seed=secrets.randbits(64))
        prepared = self.prompts.check(
            rendered,
            params,
            call.prompt_field,
            id=f"{request_id}#{next(self._numbers)}",
            priority=call.priority,
            salt=call.cache_salt,
            deadline=call.deadline,
            since=time.monotonic(),
            grammar=grammar,
        )
        self._check_room(len(prepared.request.prompt), call)
        return prepared

    def _submit(self, call: IncomingRequest, request_id: str, prepared: Prepared) -> Answer:
        if self._failure:
            raise self._failure
        outbox = Outbox(self.limits.max_unread_tokens)
        answer = Answer(
            request_id,
            call,
            prepared,
            self.prompts.tokenizer,
            self._thread,
            outbox,
            self.totals,
            self._on_answer_ended,
        )
        self._answers[prepared.request.id] = self._requests[request_id] = answer
        self._start_timer(answer, call.deadline)
        self._thread.submit(prepared.request)
        if request_id in self._aborted:
            self._thread.abort(prepared.request.id)
        return answer

    def _check_room(self, tokens: int, call: IncomingRequest) -> None:
        waiting = self.waiting_tokens + self._tokens_away
        if waiting and waiting + tokens > self.limits.max_waiting_tokens:
            raise self._full(
                f"{waiting} prompt tokens wait already; with {tokens} more they exceed "
                f"--max-waiting-tokens {self.limits.max_waiting_tokens}"
            )
        if call.deadline is None:
            return
        left = call.deadline - time.monotonic()
        forecast = self._forecast.seconds_to_first_token(self._tokens_ahead(call.priority), tokens)
        if forecast > left:
            raise DeadlineError(
                f"the first token would come in {forecast:.2f} s at best, the deadline leaves "
                f"{left:.2f} s"
            )

    def _start_timer(self, answer: Answer, deadline: float | None) -> None:
        age = time.monotonic() - answer.submitted
        seconds, what = self.limits.max_request_seconds - age, "--max-request-seconds has passed"
        if deadline is not None and deadline - time.monotonic() < seconds:
            seconds, what = deadline - time.monotonic(), "the deadline has passed"
        self._timers[answer] = asyncio.get_running_loop().call_later(
            seconds, answer.fail, DeadlineError(what)
        )

    def _forget(self, request_id: str) -> None:
        del self._requests[request_id]
        self._waiting.discard(request_id)
        self._aborted.discard(request_id)

    def _refuse(self, call: IncomingRequest, error: JaxserveError) -> None:
        for observer in self._observers:
            observer.refused(call, error)

    # ---- news

    def take(self, news: StepReport) -> None:
        """What a step brought, once per step."""
        self.loads, self.totals = news.loads, news.totals
        if any(event.tokens or event.embedding for event in news.events):
            self._forecast.observe_step(news.seconds)
        idle, now = not self._events, time.monotonic()
        self._events.extend((event, news.totals, now) for event in news.events)
        if idle:
            self._take_some()
        for observer in self._observers:
            observer.stepped(news)

    def _take_some(self) -> None:
        """A slice of the events, in order; then whoever else is due on the event loop, the writers
        among them.
        """
        for _ in range(min(SLICE, len(self._events))):
            event, totals, now = self._events.popleft()
            if answer := self._answers.get(event.request_id):
                try:
                    self._hand_over(answer, event, totals, now)
                except Exception as error:  # of this request alone
                    answer.fail(mask_internal_error(error))
        if self._events:
            asyncio.get_running_loop().call_soon(self._take_some)

    def _hand_over(
        self, answer: Answer, event: TokenEvent, totals: ComputeTotals, now: float
    ) -> None:
        waited, first = answer.id in self._waiting, event.index not in answer.newest
        tokens = answer.take(event, totals)
        if waited and answer.times:
            self._waiting.discard(answer.id)
            if answer.times.admitted:
                self._forecast.observe_prompt(answer.prompt_tokens, answer.times.cached)
        if tokens:
            seconds = now - answer.newest.get(event.index, answer.submitted)
            answer.newest[event.index] = now
            for observer in self._observers:
                observer.received(answer, tokens, first, seconds)

    def _on_answer_ended(self, answer: Answer, error: JaxserveError | None) -> None:
        del self._answers[answer.prepared.request.id]
        self._forget(answer.id)
        self._timers.pop(answer).cancel()
        for observer in self._observers:
            observer.ended(answer, error)


def new_id() -> str:
    """For a request whose client gave none."""
    return f"req-{secrets.token_hex(8)}"


def _check_size(name: str, text: str, limit: int) -> None:
    size = len(text.encode("utf-8", "replace"))
    if size > limit:
        raise RequestError(name, f"has {size} bytes; the limit is {limit}")


def _content_size(prompt: Prompt) -> int:
    """Bytes of a conversation's values; 0 for token ids, which the context bounds."""
    if not is_conversation(prompt):
        return 0
    return sum(
        len(str(value).encode("utf-8", "replace"))
        for message in prompt
        for value in message.values()
    )  # type: ignore[union-attr]
