"""Queue and forecasts of an engine, brought together with what they learn from."""

import time
from collections.abc import Callable, Iterable

from jaxserve.engine.events import Times, TokenEvent
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.answer_lengths import AnswerLengths
from jaxserve.server.core.engine_thread import Loads, StepReport
from jaxserve.server.core.pace import Pace
from jaxserve.server.core.place_forecast import PlaceForecast
from jaxserve.server.core.wait_forecast import WaitForecast, Work
from jaxserve.server.core.waiting_queue import WaitingQueue


class LoadModel:
    """Queue and forecasts of one engine, and what they learn from. Lives on the event loop.

    Args:
        rows: Number of choices that run together.
        step_tokens: Most tokens that a step computes in one lane.
        max_context: Most tokens of a prompt and its answer.
        clock: Function that returns the time in seconds; that of the engine.
    """

    def __init__(
        self,
        rows: int,
        step_tokens: int,
        max_context: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.max_context = max_context
        self.clock = clock
        self.queue = WaitingQueue(max_context)
        self.pace = Pace(step_tokens)
        self.lengths = AnswerLengths()
        self.waits = WaitForecast(rows, self.pace, self.lengths)
        self.places = PlaceForecast(self.waits, clock)
        # Choice whose messages are timed: the engine's id of its request, and its index.
        self._followed: tuple[str, int] | None = None
        self._followed_at = 0.0  # time of its last message

    def work(self, answers: Iterable[Answer], loads: Loads) -> Work:
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
        return Work(
            sorted(left),
            beginning=max(0, loads.running - len(left)),
            unbegun=sum(answer.unbegun_choices for answer in started),
            engine_waits=loads.waiting > 0,
        )

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
                tokens - times.cached, answer.submitted, computed, others_wait
            )

    def observe_end(self, answer: Answer) -> None:
        """Take in the lengths of an answer's choices that had begun."""
        if answer.incoming.embed or answer.incoming.prefill:
            return
        for completion in answer.completions:
            if tokens := len(completion.token_ids):
                self.lengths.add(tokens, cut=completion.finish_reason != "stop")
        for index in answer.running_choices:
            self.lengths.add(answer.received[index], cut=True)
