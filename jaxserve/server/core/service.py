"""The service behind gRPC and HTTP: requests in, answers out, whatever the protocol."""

import itertools
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from jaxserve.chat import Rendered
from jaxserve.engine.engine_thread import ComputeTotals, EngineThread, StepReport
from jaxserve.engine.events import TokenEvent
from jaxserve.errors import JaxserveError, QueueFullError, RequestIdInUseError
from jaxserve.prompts import Prepared, Prompt, Prompts
from jaxserve.server.core.admission import AdmissionControl
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.answer_events import Outbox
from jaxserve.server.core.answer_timers import AnswerTimers
from jaxserve.server.core.client_rules import ANY_CLIENT, ClientRules
from jaxserve.server.core.deadline_check import DeadlineCheck
from jaxserve.server.core.event_queue import EventQueue
from jaxserve.server.core.incoming_request import IncomingRequest, new_id
from jaxserve.server.core.internal_errors import mask_internal_error
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.load_model import LoadModel
from jaxserve.server.core.page_fetches import PageFetcher, PageFetches
from jaxserve.server.core.prompt_encoder import PromptEncoder
from jaxserve.server.core.request_observer import RequestObserver
from jaxserve.server.core.slow_clients import SlowClients
from jaxserve.server.core.wait_forecast import Running
from jaxserve.server.core.workers import Workers


class Service:
    """Admits requests, submits them to the engine's thread and routes its events to the answers.

    Lives on the event loop. Nothing here waits for a client: unread events lie in a bounded outbox.

    Args:
        prompts: Tokenizer, chat template and checks.
        rows: Number of choices that run together.
        step_tokens: Most tokens that a step computes in one lane.
        observers: What watches requests, such as metrics.
        page_fetcher: What has long prompts computed elsewhere; None if this engine computes all.
        prefill_only: This is a prefill server, which refuses clients.
        rules: What clients may ask for.
        gives_way: Whether the engine takes rows back from clients above their share.
        clock: Function that returns the time in seconds; that of the engine.
    """

    def __init__(
        self,
        prompts: Prompts,
        thread: EngineThread,
        rows: int,
        step_tokens: int,
        limits: Limits,
        observers: tuple[RequestObserver, ...],
        page_fetcher: PageFetcher | None = None,
        prefill_only: bool = False,
        rules: ClientRules = ANY_CLIENT,
        gives_way: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.prompts = prompts
        self.limits = limits
        self.loads = thread.loads()
        self.totals = ComputeTotals()
        self.slow_clients = SlowClients(limits.slow_client_seconds)
        self._thread = thread
        self._observers = observers
        self._workers = Workers()
        self._encoder = PromptEncoder(prompts, self._workers, limits.max_prompt_bytes, rules, clock)
        self._page_fetches = PageFetches(page_fetcher)
        self._load = LoadModel(rows, step_tokens, prompts.max_context, clock, gives_way)
        self._deadlines = DeadlineCheck(self._load, self._running)
        self._admission = AdmissionControl(
            limits, rules, self._load, self._deadlines, self._page_fetches, prefill_only
        )
        self._answers: dict[str, Answer] = {}  # by the engine's id
        # By the client's id; what came in, until it is submitted to the engine.
        self._requests: dict[str, Answer | IncomingRequest] = {}
        self._aborted: set[str] = set()  # ids of `_requests` that were aborted before submission
        self._failure: JaxserveError | None = None
        self._numbers = itertools.count(1)
        self._timers = AnswerTimers(limits.max_request_seconds, clock)
        self._events = EventQueue(self._route)

    # ---- requests

    async def answer(self, incoming: IncomingRequest, retries_itself: bool = False) -> Answer:
        """Admit a request; raise JaxserveError if it can never run, or cannot be admitted now.

        Where the caller `retries_itself`, a full queue does not count as a refusal.
        """
        if not retries_itself:
            self._load.places.note_arrival()
        try:
            return await self._admit(incoming)
        except JaxserveError as error:
            if not (retries_itself and isinstance(error, QueueFullError)):
                for observer in self._observers:
                    observer.refused(incoming, error)
            raise

    async def _admit(self, incoming: IncomingRequest) -> Answer:
        request_id = incoming.request_id or new_id()
        needs_place = self._check(incoming, request_id)
        self._requests[request_id] = incoming
        self._load.queue.enter(request_id, incoming.client, incoming.call_id)
        try:
            # A client may use an id again: the number tells events of its requests apart.
            engine_id = f"{request_id}#{next(self._numbers)}"
            prepared = await self._encoder.prepare(incoming, engine_id)
            tokens = len(prepared.request.prompt)
            start_by = self._admission.check_room(tokens, incoming, needs_place)
            prepared = _admitted(prepared, start_by)
            if not (request_id in self._aborted or self._failure):
                self._make_room(tokens, incoming, needs_place)
                await self._page_fetches.fetch(request_id, prepared.request)
            return self._submit(incoming, request_id, prepared)
        except BaseException:
            self._forget(request_id)
            raise

    def _check(self, incoming: IncomingRequest, request_id: str) -> bool:
        """Check what can be before the prompt is tokenized; see AdmissionControl.check_queue."""
        self._admission.check_role(incoming)
        self.prompts.check_purpose(incoming.embed)
        self._admission.check_fields(incoming, request_id)
        if request_id in self._requests:
            raise RequestIdInUseError(f"request_id {request_id!r} is in flight already")
        return self._admission.check_queue(incoming)

    def _make_room(self, tokens: int, incoming: IncomingRequest, needs_place: bool) -> None:
        """End requests that leave the queue for this one."""
        for displaced in self._admission.displaced_by(tokens, incoming, needs_place):
            if isinstance(answer := self._requests[displaced.id], Answer):
                answer.fail(displaced.error)

    def abort(self, request_id: str, owner: str | None = None) -> bool:
        """End a request by its client's id, if the owner is its own; None owns all.

        Its answer finishes with reason abort. Return whether it was in flight.
        """
        found = self._requests.get(request_id)
        incoming = found.incoming if isinstance(found, Answer) else found
        if incoming is None or owner not in (None, incoming.owner):
            return False
        if isinstance(found, Answer):
            self._thread.abort(found.prepared.request.id)
        else:
            self._aborted.add(request_id)
        self._page_fetches.cancel(request_id)
        return True

    def fail_all(self, error: JaxserveError) -> None:
        """End every request with this error, those that are not submitted yet as well."""
        self._failure = error
        for answer in list(self._answers.values()):
            answer.fail(error)
        self._page_fetches.cancel_all()

    def close(self) -> None:
        """Wait for prompts that are being tokenized; rendering a chat has its own time limit."""
        self._page_fetches.close()
        self._workers.close()

    @property
    def in_flight(self) -> int:
        """Number of requests that have been admitted and not ended."""
        return len(self._requests)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of requests that wait in the engine for their first token."""
        return self._admission.waiting_tokens

    @property
    def queue_seconds(self) -> float:
        """Seconds that a new request would wait for its row."""
        return self._deadlines.queue_seconds

    # ---- work beside requests

    async def tokenize(self, prompt: Prompt, name: str, **options: Any) -> Rendered:
        """Return text and token ids of a prompt; arguments as in `Prompts.encode`."""
        return await self._encoder.tokenize(prompt, name, **options)

    async def detokenize(self, ids: list[int], name: str) -> str:
        """Return the text of token ids; `name` is their field, for errors."""
        return await self._encoder.detokenize(ids, name)

    async def count_tokens(self, text: str) -> int:
        """Return the number of tokens that the tokenizer makes of a text of an answer."""
        return await self._encoder.count_tokens(text)

    async def run_in_background[T](self, work: "partial[T]") -> T:
        """Run long work that belongs to no waiting request, beside the event loop."""
        return await self._workers.run_in_background(work)

    def _running(self) -> Running:
        """Return the choices that run at present."""
        return self._load.running(self._answers.values(), self.loads)

    # ---- submission to the engine

    def _submit(self, incoming: IncomingRequest, request_id: str, prepared: Prepared) -> Answer:
        if self._failure:
            raise self._failure
        outbox = Outbox(self.limits.max_unread_tokens)
        answer = Answer(
            request_id,
            incoming,
            prepared,
            self.prompts.tokenizer,
            self._thread,
            outbox,
            self.totals,
            self._on_answer_ended,
        )
        self._answers[prepared.request.id] = answer
        self._requests[request_id] = answer
        self._load.queue.queue_prompt(request_id, prepared.request)
        self._timers.start(answer, incoming.deadline)
        self._thread.submit(prepared.request)
        # Submitted all the same, so that the answer ends with finish reason abort.
        if request_id in self._aborted:
            self._thread.abort(prepared.request.id)
        return answer

    def _forget(self, request_id: str) -> None:
        del self._requests[request_id]
        self._load.leave_queue(request_id)
        self._aborted.discard(request_id)

    # ---- events of the engine

    def take(self, report: StepReport) -> None:
        """Take in the report of a step; called once per step."""
        self.loads = report.loads
        self.totals = report.totals
        now = self._load.clock()
        self._load.observe_step(report)
        for engine_id, cached_tokens in report.begun.items():
            if answer := self._answers.get(engine_id):
                answer.begin(cached_tokens)
                self._load.queue.begin(answer.id)
        self._events.add(report, now)
        for observer in self._observers:
            observer.stepped(report)

    def _route(self, event: TokenEvent, totals: ComputeTotals, now: float) -> None:
        if answer := self._answers.get(event.request_id):
            try:
                self._give(answer, event, totals, now)
            except Exception as error:  # a bug that concerns this request alone
                answer.fail(mask_internal_error(error))

    def _give(self, answer: Answer, event: TokenEvent, totals: ComputeTotals, now: float) -> None:
        was_waiting = answer.id in self._load.queue
        is_first = event.index not in answer.last_tokens_at
        tokens = answer.take(event, totals)
        if was_waiting and answer.times:
            self._load.observe_begin(answer, event)
        if tokens:
            seconds = now - answer.last_tokens_at.get(event.index, answer.submitted)
            answer.last_tokens_at[event.index] = now
            answer.received[event.index] += tokens
            for observer in self._observers:
                observer.received(answer, tokens, is_first, seconds)

    def _on_answer_ended(self, answer: Answer, error: JaxserveError | None) -> None:
        del self._answers[answer.prepared.request.id]
        self._forget(answer.id)
        self._timers.stop(answer)
        self._load.observe_end(answer)
        if _enters_again(answer, error):
            return
        for observer in self._observers:
            observer.ended(answer, error)


def _admitted(prepared: Prepared, start_by: float | None) -> Prepared:
    """Return an admitted request, with a seed and the time until which it has to begin."""
    request = prepared.request
    params = request.params
    if params.seed is None:
        params = replace(params, seed=secrets.randbits(64))
    return replace(prepared, request=replace(request, params=params, start_by=start_by))


def _enters_again(answer: Answer, error: JaxserveError | None) -> bool:
    """Return whether a request left the queue for another one and enters it again by itself."""
    return answer.incoming.embed and isinstance(error, QueueFullError)
