"""Service: what the server does, whatever the protocol. gRPC and HTTP are facades over one object of this class."""

import asyncio
import itertools
import secrets
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from jaxserve.chat import Rendered
from jaxserve.engine.plan import TokenEvent
from jaxserve.errors import DeadlineError, JaxserveError, QueueFullError, RequestError, RequestIdInUseError
from jaxserve.prompts import Prompt, Prompts, is_conversation
from jaxserve.request import SamplingParams
from jaxserve.server.answer import Answer
from jaxserve.server.engine_thread import EngineThread, Loads, StepNews, Tally
from jaxserve.server.forecast import Forecast
from jaxserve.server.incidents import presentable
from jaxserve.server.limits import Limits
from jaxserve.server.news import Outbox
from jaxserve.server.slow_clients import SlowClients

MAX_ID_BYTES = 128
MAX_SALT_BYTES = 128
MAX_PRIORITY = 100
SLICE = 32  # events handled in one turn of the event loop: what else is due waits for no more
SHORT = 2048  # letters or tokens that are encoded on the event loop


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request at the door. timeout: seconds that the client will wait; None: as long as the limits allow.

    prompt_field: the prompt's path in the client's message, for errors.
    """

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt_field: str = "prompt"
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None


class Observer(Protocol):
    """Who counts: the metrics, the log."""

    def refused(self, error: JaxserveError) -> None: ...
    def stepped(self, news: StepNews) -> None: ...
    def received(self, answer: Answer, tokens: int, first: bool, seconds: float) -> None: ...
    def ended(self, answer: Answer, error: JaxserveError | None) -> None: ...


class Service:
    """Admits requests, hands them to the engine's thread and its news to them. Lives on the event loop.

    Nothing waits for a client here: what is not read lies in a bounded outbox.
    """

    def __init__(
        self,
        prompts: Prompts,
        thread: EngineThread,
        forecast: Forecast,
        limits: Limits,
        observers: tuple[Observer, ...],
    ):
        self.prompts, self.limits = prompts, limits
        self.loads, self.tally = Loads(), Tally()
        self.slow_clients = SlowClients(limits.slow_client_seconds)
        self._thread, self._forecast, self._observers = thread, forecast, observers
        self._answers: dict[str, Answer] = {}  # by the engine's id
        self._ids: set[str] = set()  # the clients' ids, those that are still being tokenized among them
        self._waiting_tokens = 0
        self._waiting = 0
        self._numbers = itertools.count(1)
        self._timers: dict[Answer, asyncio.TimerHandle] = {}
        self._events: deque[tuple[TokenEvent, Tally, float]] = deque()
        self._tokenizing = ThreadPoolExecutor(2, "tokenize")

    # ---- requests

    async def answer(self, call: Call) -> Answer:
        """Admit a request. JaxserveError when it cannot run, or not now."""
        request_id = call.request_id or f"req-{secrets.token_hex(8)}"
        try:
            self._check(call, request_id)
            self._enter(request_id)
        except JaxserveError as error:
            self._refuse(error)
            raise
        try:
            rendered = await self.encode(call.prompt, call.prompt_field)
            return self._submit(call, request_id, rendered)
        except BaseException as error:
            self._leave(request_id)
            if isinstance(error, JaxserveError):
                self._refuse(error)
            raise

    def abort(self, request_id: str) -> bool:
        """End a request by its client's id; its answer finishes with reason abort. Whether it was in flight."""
        found = [answer for answer in self._answers.values() if answer.id == request_id]
        for answer in found:
            self._thread.abort(answer.prepared.request.id)
        return bool(found)

    async def encode(self, prompt: Prompt, name: str) -> Rendered:
        """Text and token ids of a prompt; long ones, and conversations, beside the event loop."""
        size = len(prompt.encode("utf-8", "replace")) if isinstance(prompt, str) else _content_size(prompt)
        if size > self.limits.max_prompt_bytes:
            limit = self.limits.max_prompt_bytes
            raise RequestError(name, f"has {size} bytes of text; the limit is {limit} (--max-prompt-bytes)")
        if is_conversation(prompt) or len(prompt) > SHORT:
            return await self.beside(partial(self.prompts.encode, prompt, name))
        return self.prompts.encode(prompt, name)

    async def beside[T](self, function: "partial[T]") -> T:
        """Run what takes long on a thread of the tokenizers."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function)

    def fail_all(self, error: JaxserveError) -> None:
        for answer in list(self._answers.values()):
            answer.fail(error)

    def close(self) -> None:
        """Wait for what is being tokenized: a conversation's rendering has its own time limit."""
        self._tokenizing.shutdown(cancel_futures=True)

    @property
    def in_flight(self) -> int:
        return len(self._ids)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of requests without a first token."""
        return self._waiting_tokens

    # ---- admission

    def _check(self, call: Call, request_id: str) -> None:
        _check_size("request_id", request_id, MAX_ID_BYTES)
        _check_size("cache_salt", call.cache_salt, MAX_SALT_BYTES)
        if abs(call.priority) > MAX_PRIORITY:
            raise RequestError("priority", f"is {call.priority}; it must be between -{MAX_PRIORITY} and {MAX_PRIORITY}")
        if request_id in self._ids:
            raise RequestIdInUseError(f"request_id {request_id!r} is in flight already")
        if self._waiting >= self.limits.max_waiting_requests:
            raise self._full(f"{self._waiting} requests wait already; the limit is --max-waiting-requests")

    def _full(self, problem: str) -> QueueFullError:
        seconds = self._forecast.seconds_to_first_token(self._waiting_tokens, 0)
        return QueueFullError(problem, min(max(seconds, 0.1), 60.0))

    def _submit(self, call: Call, request_id: str, rendered: Rendered) -> Answer:
        params = call.params if call.params.seed is not None else replace(call.params, seed=secrets.randbits(64))
        prepared = self.prompts.check(
            rendered,
            params,
            call.prompt_field,
            id=f"{request_id}#{next(self._numbers)}",
            priority=call.priority,
            salt=call.cache_salt,
            deadline=None if call.timeout is None else time.monotonic() + call.timeout,
        )
        tokens = len(prepared.request.prompt)
        self._check_room(tokens, call.timeout)
        outbox = Outbox(self.limits.max_unread_tokens)
        answer = Answer(
            request_id, prepared, self.prompts.tokenizer, self._thread, outbox, self.tally, self._on_answer_ended
        )
        self._answers[prepared.request.id] = answer
        self._waiting_tokens += tokens
        self._start_timer(answer, call.timeout)
        self._thread.submit(prepared.request)
        return answer

    def _check_room(self, tokens: int, timeout: float | None) -> None:
        if self._waiting_tokens and self._waiting_tokens + tokens > self.limits.max_waiting_tokens:
            raise self._full(
                f"{self._waiting_tokens} prompt tokens wait already; with {tokens} more they exceed "
                f"--max-waiting-tokens {self.limits.max_waiting_tokens}"
            )
        forecast = self._forecast.seconds_to_first_token(self._waiting_tokens, tokens)
        if timeout is not None and forecast > timeout:
            raise DeadlineError(
                f"the first token would come in {forecast:.2f} s at best, the deadline leaves {timeout:.2f} s"
            )

    def _start_timer(self, answer: Answer, timeout: float | None) -> None:
        seconds = min(self.limits.max_request_seconds, self.limits.max_request_seconds if timeout is None else timeout)
        whose = "--max-request-seconds" if timeout is None or seconds < timeout else "its deadline"
        error = DeadlineError(f"the request ran for {seconds:.2f} s, which is {whose}")
        self._timers[answer] = asyncio.get_running_loop().call_later(seconds, answer.fail, error)

    def _enter(self, request_id: str) -> None:
        self._ids.add(request_id)
        self._waiting += 1

    def _leave(self, request_id: str) -> None:
        """Of a request that never became an answer."""
        self._ids.discard(request_id)
        self._waiting -= 1

    def _refuse(self, error: JaxserveError) -> None:
        for observer in self._observers:
            observer.refused(error)

    # ---- news

    def take(self, news: StepNews) -> None:
        """What a step brought, once per step."""
        self.loads, self.tally = news.loads, news.tally
        self._forecast.saw_step(news.seconds)
        idle, now = not self._events, time.monotonic()
        self._events.extend((event, news.tally, now) for event in news.events)
        if idle:
            self._take_some()
        for observer in self._observers:
            observer.stepped(news)

    def _take_some(self) -> None:
        """A slice of the events, in order; then whoever else is due on the event loop, the writers among them."""
        for _ in range(min(SLICE, len(self._events))):
            event, tally, now = self._events.popleft()
            if answer := self._answers.get(event.request_id):
                try:
                    self._hand_over(answer, event, tally, now)
                except Exception as error:  # of this request alone
                    answer.fail(presentable(error))
        if self._events:
            asyncio.get_running_loop().call_soon(self._take_some)

    def _hand_over(self, answer: Answer, event: TokenEvent, tally: Tally, now: float) -> None:
        waited, first = not answer.started, event.index not in answer.newest
        tokens = answer.take(event, tally)
        if waited and answer.times:
            self._stop_waiting(answer)
            self._forecast.saw_prompt(answer.prompt_tokens, answer.times.cached)
        if tokens:
            seconds = now - answer.newest.get(event.index, answer.submitted)
            answer.newest[event.index] = now
            for observer in self._observers:
                observer.received(answer, tokens, first, seconds)

    def _stop_waiting(self, answer: Answer) -> None:
        self._waiting -= 1
        self._waiting_tokens -= answer.prompt_tokens

    def _on_answer_ended(self, answer: Answer, error: JaxserveError | None) -> None:
        del self._answers[answer.prepared.request.id]
        self._ids.discard(answer.id)
        self._timers.pop(answer).cancel()
        if not answer.started:
            self._stop_waiting(answer)
        for observer in self._observers:
            observer.ended(answer, error)


def _check_size(name: str, text: str, limit: int) -> None:
    size = len(text.encode("utf-8", "replace"))
    if size > limit:
        raise RequestError(name, f"has {size} bytes; the limit is {limit}")


def _content_size(prompt: Prompt) -> int:
    """Bytes of a conversation's texts; 0 for token ids, which the context bounds."""
    if not is_conversation(prompt):
        return 0
    return sum(len(str(message.get("content", "")).encode("utf-8", "replace")) for message in prompt)  # type: ignore[union-attr]
