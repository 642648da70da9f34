"""Queue and forecasts of an engine, brought together with what they learn from."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxserve.engine.engine_thread import Loads, StepReport
from jaxserve.engine.events import Times, TokenEvent
from jaxserve.engine.host.row_shares import HEAVIER
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.answer_lengths import AnswerLengths
from jaxserve.server.core.pace import Pace
from jaxserve.server.core.place_forecast import PlaceForecast
from jaxserve.server.core.wait_forecast import Running, WaitForecast, Work
from jaxserve.server.core.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class _Begun:
    """First message of an answer, and the pace that was known then."""

    choice: int
    tokens: int
    at: float
    seconds_per_token: float


class LoadModel:
    """Queue and forecasts of one engine, and what they learn from. Lives on the event loop.

    Args:
        rows: Number of choices that run together.
        step_tokens: Most tokens that a step computes in one lane.
        max_context: Most tokens of a prompt and its answer.
        clock: Function that returns the time in seconds; that of the engine.
        gives_way: Whether the engine takes rows back from clients above their share.
    """

    def __init__(
        self,
        rows: int,
        step_tokens: int,
        max_context: int,
        clock: Callable[[], float] = time.monotonic,
        gives_way: bool = True,
    ):
        self.max_context = max_context
        self._rows = rows
        self._gives_way = gives_way
        self.clock = clock
        self.queue = WaitingQueue(max_context)
        self.pace = Pace(step_tokens)
        self.lengths = AnswerLengths()
        self.waits = WaitForecast(rows, self.pace, self.lengths)
        self.places = PlaceForecast(self.waits, clock)
        self._begun: dict[str, _Begun] = {}  # by request id
        # Choice whose messages are timed: the engine's id of its request, and its index.
        self._followed: tuple[str, int] | None = None
        self._followed_at = 0.0  # time of its last message

    def running(self, answers: Iterable[Answer], loads: Loads) -> Running:
        """Return what the answers in flight still keep the engine busy with.

        Args:
            loads: Those of the last step.
        """
        started = [answer for answer in answers if answer.started]
        left = [
            self.waits.seconds_left(answer.max_tokens or self.max_context, answer.received[index])
            for answer in started
            for index in answer.running_choices
        ]
        return Running(
            sorted(left),
            beginning=max(0, loads.running - len(left)),
            engine_waits=loads.waiting > 0,
            held=_by_client(started, lambda answer: len(answer.running_choices)),
            unbegun_of=_by_client(started, lambda answer: answer.unbegun_choices),
        )

    def work_before(self, client: str, priority: int, choices: int, running: Running) -> Work:
        """Return the work ahead of a request of so many choices, without those that wait.

        It is the engine that lets some choices of other clients begin first, and takes rows back
        from clients above their share; see WaitingChoices and RowShares there.
        """
        turns = self.queue.choices_of(client) + choices
        unbegun = 0
        for (other_priority, other), count in running.unbegun_of.items():
            if other_priority < priority or other == client:
                unbegun += count
            elif other_priority == priority:
                unbegun += min(count, turns)
        given_up = self._rows_given_up(client, priority, turns, running) if self._gives_way else 0
        return Work(running, unbegun=unbegun, given_up=given_up)

    def _rows_given_up(self, client: str, priority: int, turns: int, running: Running) -> int:
        share = self._share(client, running)
        own = running.rows_of.get(client, 0)
        heavy = [
            other
            for other, rows in running.rows_of.items()
            if rows > share and rows + self.queue.choices_of(other) > HEAVIER * (own + turns)
        ]
        if not heavy:
            return 0
        may_give = Counter[str]()  # rows of no higher priority
        for (other_priority, other), rows in running.held.items():
            may_give[other] += rows * (other_priority >= priority)
        above = sum(min(may_give[other], running.rows_of[other] - share) for other in heavy)
        return min(above, max(0, share - own))

    def rounds(self, client: str, choices: int, running: Running) -> int:
        """Return in how many rounds the choices of a request run, one after the other.

        It has all rows but those that clients take from it which ask for far less.
        """
        if not self._gives_way or choices == 1:
            return 1
        held = running.rows_of
        asked = held.get(client, 0) + self.queue.choices_of(client) + choices
        lights = 0
        for other in (held.keys() | self.queue.clients) - {client}:
            others_asked = held.get(other, 0) + self.queue.choices_of(other)
            lights += others_asked if HEAVIER * others_asked < asked else 0
        rows = max(self._share(client, running), self._rows - lights)
        return math.ceil(choices / rows)

    def _share(self, client: str, running: Running) -> int:
        """Return the rows of each client where all have equally many."""
        return max(1, self._rows // len({client, *running.rows_of, *self.queue.clients}))

    def observe_step(self, report: StepReport) -> None:
        """Take in the time between two messages of a choice that is followed to its end."""
        for event in report.events:
            if (event.request_id, event.index) == self._followed:
                if event.tokens:
                    seconds = report.collected - self._followed_at
                    self.pace.observe_tokens(seconds, len(event.tokens))
                    self._followed_at = report.collected
                if event.finish:
                    self._followed = None
        if self._followed is None:
            self._follow_another(report)

    def _follow_another(self, report: StepReport) -> None:
        for event in report.events:
            if event.tokens and not event.finish:
                self._followed = event.request_id, event.index
                self._followed_at = report.collected
                return

    def leave_queue(self, request_id: str) -> None:
        """Take out a request that has ended, if it still waits."""
        if self.queue.has_prompt(request_id):
            # It may have been computed for a while: the next first token says less.
            self.pace.forget_last_prompt()
        self.queue.leave(request_id)

    def observe_begin(self, answer: Answer, event: TokenEvent) -> None:
        """Take an answer from the queue whose first event came."""
        self.queue.leave(answer.id)
        others_wait = len(self.queue) > 0
        self.places.observe_place(answer.submitted, others_wait)
        times = event.times or Times()
        computed = times.finished if event.embedding else times.first_token
        if not computed:  # it ended without, or only log-probabilities of its prompt have come
            self.pace.forget_last_prompt()
        else:
            tokens = answer.prompt_tokens
            self.pace.observe_prompt(tokens, times.cached, computed - times.admitted)
            self.pace.observe_first_token(
                tokens - times.cached, times.admitted, computed, others_wait
            )
            self._begun[answer.id] = _Begun(
                event.index, len(event.tokens), computed, self.pace.seconds_per_token
            )

    def observe_end(self, answer: Answer) -> None:
        """Take in the lengths of an answer's choices that had begun, and its pace."""
        if begun := self._begun.pop(answer.id, None):
            seconds = answer.last_tokens_at.get(begun.choice, begun.at) - begun.at
            later = answer.received[begun.choice] - begun.tokens
            self.pace.observe_answer(seconds, later, begun.seconds_per_token)
        if answer.incoming.embed or answer.incoming.prefill:
            return
        for completion in answer.completions:
            if tokens := len(completion.token_ids):
                self.lengths.add(tokens, cut=completion.finish_reason != "stop")
        for index in answer.running_choices:
            self.lengths.add(answer.received[index], cut=True)


def _by_client(
    answers: Iterable[Answer], number: Callable[[Answer], int]
) -> Counter[tuple[int, str]]:
    """Return the sums of a number over the answers of each priority and client."""
    sums = Counter[tuple[int, str]]()
    for answer in answers:
        if count := number(answer):
            sums[answer.incoming.priority, answer.incoming.client] += count
    return sums
