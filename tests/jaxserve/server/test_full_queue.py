"""Clients that find the queue full come back when there is a place, each for one of its own.

Origin: a router whose refusals did not say when to come back, so that clients gave up
(vllm-project/router#281). Right is what the clients' own tries and waits allow.
"""

import asyncio
import heapq
import itertools
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI

from jaxserve.client import AsyncClient
from jaxserve.engine.engine_thread import ComputeTotals, Loads, StepReport
from jaxserve.engine.events import Finish, FinishReason, TokenEvent
from jaxserve.server.core.answer_lengths import KNOWN
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.load_model import LoadModel
from jaxserve.server.core.pace import (
    ANSWERS,
    FEWEST_ANSWERS,
    FEWEST_TOKENS,
    MOST_SLOWNESS,
    Pace,
)
from jaxserve.server.core.place_forecast import (
    GONE,
    LATE,
    MAX_SECONDS,
    MIN_SECONDS,
    SPREAD_SECONDS,
    PlaceForecast,
)
from jaxserve.server.core.wait_forecast import FIRST_TOKENS, RowTimes, Running, Work
from tests.jaxserve.server.http.harness import Http, serving

STEP = 0.02  # seconds


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def load_of(clock: Clock, rows: int = 1, answers: int = 0, length: int = 100) -> LoadModel:
    """The load of a server that has seen a step, and so many answers of this length."""
    load = LoadModel(rows, 512, 131_072, clock)
    load.pace.observe_tokens(STEP, 1)
    for _ in range(answers):
        load.lengths.add(length, cut=False)
    return load


def forecast(clock: Clock, rows: int = 1, answers: int = 0, length: int = 100) -> PlaceForecast:
    return load_of(clock, rows, answers, length).places


# ---- what is expected


def test_a_choice_takes_as_long_as_usual_and_at_most_its_max_tokens() -> None:
    waits = load_of(Clock(), answers=KNOWN, length=100).waits
    assert waits.seconds_of(4000) == pytest.approx(100 * STEP)
    assert waits.seconds_of(30) == pytest.approx(30 * STEP)
    unknown = load_of(Clock(), answers=KNOWN - 1, length=100).waits
    assert unknown.seconds_of(4000) == pytest.approx(FIRST_TOKENS * STEP)
    assert unknown.seconds_of(30) == pytest.approx(30 * STEP)


def test_prompts_are_computed_one_after_the_other_behind_their_rows() -> None:
    """Rows that come free together leave the last prompt waiting for all others."""
    load = load_of(Clock(), rows=4, answers=KNOWN, length=100)
    load.pace.observe_first_token(10, 0.0, 0.0, others_wait=True)
    load.pace.observe_first_token(10, 0.0, 0.5, others_wait=False)
    together = Work(Running([2.0, 2.0, 2.0, 2.0]), prompt_tokens=10, max_tokens=100)
    assert load.waits.seconds_to_start(1, 10, together) == pytest.approx(2.0)
    assert load.waits.seconds_to_start(4, 40, together) == pytest.approx(2.0 + 3 * 0.5)
    first_apart = Work(Running([0.5, 2.0, 2.0, 2.0]), prompt_tokens=10, max_tokens=100)
    assert load.waits.seconds_to_start(4, 40, first_apart) == pytest.approx(2.0 + 2 * 0.5)
    apart = Work(Running([1.0, 2.0, 3.0, 4.0]), prompt_tokens=10, max_tokens=100)
    assert load.waits.seconds_to_start(4, 40, apart) == pytest.approx(4.0)
    free = Work(Running([]), prompt_tokens=10, max_tokens=100)
    assert load.waits.seconds_to_start(4, 40, free) == pytest.approx(3 * 0.5)


def test_the_turn_of_a_prompt_is_that_behind_the_latest_row_of_all() -> None:
    """As one prompt after the other would have it, over several rounds of the rows."""
    draw = random.Random(0)
    for _ in range(500):
        first = sorted(draw.choice([0.0, draw.uniform(0, 5)]) for _ in range(4))
        rows = RowTimes(first, round_seconds=draw.uniform(0, 4))
        each = draw.choice([0.0, draw.uniform(0, 1.5)])
        turn = 0.0
        for number in range(1, 20):
            turn = max(turn, rows.seconds_to(number))
            assert rows.seconds_to_prompt(number, each) == pytest.approx(turn)
            turn += each


def test_one_long_answer_changes_little() -> None:
    load = load_of(Clock(), answers=KNOWN, length=100)
    load.lengths.add(32_000, cut=True)
    assert load.waits.seconds_of(131_072) == pytest.approx(100 * STEP)


def test_a_choice_that_outlives_the_usual_goes_on_for_half_as_long_again() -> None:
    waits = load_of(Clock(), answers=KNOWN, length=100).waits
    assert waits.seconds_left(4000, 50) == pytest.approx(50 * STEP)
    assert waits.seconds_left(4000, 300) == pytest.approx(150 * STEP)
    assert waits.seconds_left(310, 300) == pytest.approx(10 * STEP)
    assert waits.seconds_left(200, 300) == 0


def test_places_come_free_when_rows_do() -> None:
    places = forecast(Clock(), rows=2, answers=KNOWN, length=100)
    work = Work(Running([0.5, 1.5]), max_tokens=100)
    found = [places.place_times(work)(number) for number in range(1, 6)]
    assert found == pytest.approx([0.5, 1.5, 2.5, 3.5, 4.5])
    # The choices of a request before the place get their rows first.
    work = Work(Running([0.5, 1.5]), choices=2, max_tokens=100)
    found = [places.place_times(work)(number) for number in (1, 2)]
    assert found == pytest.approx([0.5, 2.5])


def test_a_free_row_counts_unless_the_engine_cannot_use_it() -> None:
    places = forecast(Clock(), rows=3, answers=KNOWN, length=100)
    assert places.place_times(Work(Running([0.5])))(1) == 0
    assert places.place_times(Work(Running([0.5])))(3) == pytest.approx(0.5)
    waiting = Work(Running([0.5], engine_waits=True))
    assert places.place_times(waiting)(1) == pytest.approx(0.5)


# ---- who comes back when


def test_each_client_is_told_a_time_of_its_own() -> None:
    places = forecast(Clock(), answers=KNOWN, length=100)
    work = Work(Running([1.0]), max_tokens=100)
    told = [places.come_back_in(work) for _ in range(4)]
    assert told == pytest.approx([LATE * seconds for seconds in (1, 3, 5, 7)])


def test_a_client_that_came_or_will_not_come_any_more_is_counted_no_longer() -> None:
    clock = Clock()
    places = forecast(clock, answers=KNOWN, length=100)
    work = Work(Running([1.0]), max_tokens=100)
    first, second = places.come_back_in(work), places.come_back_in(work)
    clock.now = first
    places.note_arrival()  # and finds the place taken
    assert places.come_back_in(work) == pytest.approx(LATE * 3), "one other is to come"
    clock.now += second + GONE
    places.note_arrival()
    assert places.come_back_in(work) == pytest.approx(LATE * 1)


def test_a_promise_that_came_too_early_takes_no_place() -> None:
    """Its client will find none and be told again."""
    load = LoadModel(1, 512, 4096, Clock())
    guessed = [load.places.come_back_in(Work(Running([]))) for _ in range(3)]
    load.pace.observe_tokens(STEP, 1)
    assert max(guessed) < 10
    work = Work(Running([10.0]), max_tokens=100)
    assert load.places.come_back_in(work) == pytest.approx(LATE * 10)


def test_the_bounds() -> None:
    places = forecast(Clock(), answers=KNOWN, length=100)
    assert places.come_back_in(Work(Running([0.0]))) == MIN_SECONDS
    told = [places.come_back_in(Work(Running([1e6]))) for _ in range(50)]
    assert all(MAX_SECONDS - SPREAD_SECONDS <= each <= MAX_SECONDS for each in told)
    assert len(set(told)) == 50, "they do not come back together"
    places = forecast(Clock(), answers=KNOWN, length=100)
    work = Work(Running([1.0]), max_tokens=100)
    assert places.come_back_in(work, places=3) == pytest.approx(LATE * 5)


def test_before_the_first_step_a_place_a_second_is_guessed() -> None:
    places = LoadModel(1, 512, 4096, Clock()).places
    told = [places.come_back_in(Work(Running([]))) for _ in range(2)]
    assert told == pytest.approx([LATE, 2 * LATE])


# ---- a simulation

Job = Callable[[], None]


@dataclass
class Simulation:
    """Servers' rows, a queue, and callers that give up after `tries`; all on one clock."""

    rows: int
    waiting: int
    length: int
    max_tokens: int
    tries: int = 3
    answers: int = 0
    seed: int = 0
    clock: Clock = field(default_factory=Clock)
    served: int = 0
    lost: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.load = load_of(self.clock, self.rows, self.answers, self.length)
        self.places = self.load.places
        self.queue: deque[float] = deque()  # times of arrival
        self.began: list[float] = []
        self.numbers = itertools.count()
        self.jobs: list[tuple[float, int, Job]] = []

    def later(self, seconds: float, job: Job) -> None:
        heapq.heappush(self.jobs, (self.clock.now + seconds, next(self.numbers), job))

    def run(self, callers: int, gap: float = 0.0) -> None:
        for caller in range(callers):
            self.later(gap * caller + self.draw.random() * STEP, lambda: self.ask(1))
        while self.jobs:
            self.clock.now, _, job = heapq.heappop(self.jobs)
            job()

    def ask(self, attempt: int) -> None:
        self.places.note_arrival()
        if len(self.queue) < self.waiting:
            self.queue.append(self.clock.now)
            self.later(STEP, self.begin)
        elif attempt == self.tries:
            self.lost += 1
        else:
            left = sorted(
                self.load.waits.seconds_left(self.max_tokens, round((self.clock.now - each) / STEP))
                for each in self.began
            )
            seconds = self.places.come_back_in(Work(Running(left), max_tokens=self.max_tokens))
            self.later(seconds + STEP * self.draw.random(), lambda: self.ask(attempt + 1))

    def begin(self) -> None:
        while self.queue and len(self.began) < self.rows:
            arrived = self.queue.popleft()
            self.places.observe_place(arrived, bool(self.queue))
            began = self.clock.now
            self.began.append(began)
            seconds = self.length * STEP * self.draw.uniform(0.8, 1.2)
            self.later(seconds, partial(self.end, began))

    def end(self, began: float) -> None:
        self.began.remove(began)
        self.served += 1
        self.load.lengths.add(self.length, cut=False)
        self.begin()


@pytest.mark.parametrize("answers", [0, 20])
@pytest.mark.parametrize(
    "rows, waiting, callers", [(1, 1, 8), (1, 2, 8), (2, 4, 8), (4, 4, 40), (16, 16, 200)]
)
def test_all_are_served_in_three_tries(rows: int, waiting: int, callers: int, answers: int) -> None:
    """The old hint, 0.1 s, served those that found a place at once: 2, 3, 6, 8 and 32."""
    served = 0
    for seed in range(10):
        simulation = Simulation(rows, waiting, 100, 100, answers=answers, seed=seed)
        simulation.run(callers)
        served += simulation.served
        assert simulation.served + simulation.lost == callers
    assert served >= 0.99 * 10 * callers


@pytest.mark.parametrize("answers", [0, 1, 20])
@pytest.mark.parametrize("rows, waiting, callers", [(1, 2, 8), (4, 4, 40), (16, 16, 200)])
def test_a_limit_far_above_the_usual_length_costs_no_tries(
    rows: int, waiting: int, callers: int, answers: int
) -> None:
    served = 0
    for seed in range(5):
        simulation = Simulation(rows, waiting, 100, 131_072, answers=answers, seed=seed)
        simulation.run(callers)
        served += simulation.served
    assert served >= 0.98 * 5 * callers


def test_clients_that_never_come_back_do_not_send_others_away() -> None:
    clock = Clock()
    places = forecast(clock, answers=KNOWN, length=100)
    work = Work(Running([1.0]), max_tokens=100)
    for _ in range(200):
        clock.now += 1.0
        places.note_arrival()
        places.come_back_in(work)
    clock.now += MAX_SECONDS + GONE
    places.note_arrival()
    assert places.come_back_in(work) == pytest.approx(LATE)


def test_the_time_between_places_counts_where_nothing_else_explains_it() -> None:
    """As with prompts that other servers compute, while rows are free."""
    clock = Clock()
    places = forecast(clock, rows=64)
    for _ in range(5):
        places.observe_place(0.0, others_wait=True)
        clock.now += 2.0
    told = [places.come_back_in(Work(Running([]))) for _ in range(3)]
    assert told == pytest.approx([LATE * seconds for seconds in (2, 4, 6)])


def test_time_without_any_client_is_no_time_between_places() -> None:
    """Others waited when the last place came free, and then they left."""
    clock = Clock()
    load = load_of(clock, rows=64, answers=KNOWN)
    load.places.observe_place(0.0, others_wait=True)
    load.pace.observe_first_token(10, 0.0, 0.0, others_wait=True)
    clock.now = 3600.0
    load.places.observe_place(clock.now - 0.5, others_wait=False)
    load.pace.observe_first_token(10, clock.now - 0.5, clock.now, others_wait=False)
    assert load.places.come_back_in(Work(Running([]))) == pytest.approx(LATE * 0.5)
    assert load.pace.queue_seconds(10) == pytest.approx(0.5)


# ---- what is learnt about the pace


def report_of(tokens: int, collected: float, finish: Finish | None = None) -> StepReport:
    event = TokenEvent("a#1", 0, list(range(tokens)), finish=finish)
    return StepReport([event], Loads(), ComputeTotals(), 0.0, 0.0, collected)


def test_the_pace_is_that_of_the_engine() -> None:
    """Whatever the event loop does meanwhile: the reports have the times."""
    load = LoadModel(1, 512, 4096, Clock())
    for step in range(40):
        load.observe_step(report_of(2, 0.01 * step))
    assert load.pace.seconds_per_token == pytest.approx(5e-3)
    load.observe_step(report_of(2, 0.4, finish=Finish(FinishReason.LENGTH)))
    load.observe_step(report_of(1, 3600.0))  # the first token of the next one
    load.observe_step(report_of(1, 3600.005))
    assert load.pace.seconds_per_token == pytest.approx(5e-3)


def test_a_stall_of_the_machine_changes_no_pace_and_slow_steps_do() -> None:
    pace = Pace(512)
    for gap in [5e-3] * 50 + [1.0] + [5e-3] * 5:
        pace.observe_tokens(gap, 1)
    assert pace.seconds_per_token == pytest.approx(5e-3)
    pace = Pace(512)
    for number in range(200):
        pace.observe_tokens(10e-3 if number % 10 else 100e-3, 1)
    assert pace.seconds_per_token == pytest.approx(19e-3, rel=0.1)


def test_a_prompt_that_was_computed_for_nothing_is_no_time_of_the_next() -> None:
    pace = Pace(512)
    for number in range(3):
        pace.observe_first_token(10, 0.0, 0.1 * number, others_wait=True)
    known = pace.queue_seconds(100)
    pace.forget_last_prompt()
    pace.observe_first_token(10, 0.0, 20.0, others_wait=True)
    assert pace.queue_seconds(100) == known == pytest.approx(1.0)


def test_the_wait_for_a_row_is_no_time_of_a_prompt() -> None:
    pace = Pace(512)
    pace.observe_first_token(10, 0.0, 1.0, others_wait=True)
    pace.observe_first_token(10, 5.0, 5.1, others_wait=True)
    assert pace.queue_seconds(100) == pytest.approx(1.0)


def test_most_answers_are_no_slower_than_expected() -> None:
    pace = Pace(512)
    for number in range(FEWEST_ANSWERS - 1):
        pace.observe_answer(3.0, 10, 0.1)
        pace.observe_answer(3.0, FEWEST_TOKENS - 1, 0.1)  # says little
        pace.observe_answer(3.0, 10, 0.0)  # nothing was expected
        assert pace.slowness.value == 1.0, number
    pace.observe_answer(3.0, 10, 0.1)
    assert pace.slowness.value == MOST_SLOWNESS
    for number in range(ANSWERS):
        pace.observe_answer(1.5 if number % 5 == 0 else 0.5, 10, 0.1)
    assert pace.slowness.value == pytest.approx(1.5)
    for _ in range(ANSWERS):
        pace.observe_answer(0.5, 10, 0.1)
    assert pace.slowness.value == 1.0


def test_prompts_that_end_in_one_step_take_no_time_of_their_own() -> None:
    pace = Pace(512)
    pace.observe_prompt(300, 0, 0.0)
    assert pace.least_seconds(1000, 0) == 0, "nothing is known"
    pace.observe_prompt(300, 0, 0.3)
    pace.observe_prompt(300, 0, 0.0)
    pace.observe_prompt(300, 0, 3.0)
    assert pace.least_seconds(1000, 0) == pytest.approx(1.0, rel=1e-3)


# ---- clients as they are

ASK: dict[str, Any] = {"max_tokens": 60, "seed": 1}
Ask = Callable[[], Awaitable[object]]


def openai_asks(http: Http) -> Ask:
    client = openai.AsyncOpenAI(base_url=f"{http.base}/v1", api_key="none", http_client=http.raw)
    extra = {"ignore_eos": True}
    return lambda: client.completions.create(model="fake", prompt="x", extra_body=extra, **ASK)


def langchain_asks(http: Http) -> Ask:
    model = ChatOpenAI(
        base_url=f"{http.base}/v1",
        api_key="none",  # type: ignore[arg-type]
        model="fake",
        http_async_client=http.raw,
        extra_body={"ignore_eos": True},
        **ASK,
    )
    return lambda: model.ainvoke("x")


def our_client_asks(http: Http) -> Ask:
    client = AsyncClient(http.server.address)
    return lambda: client.generate("x", ignore_eos=True, **ASK)


@pytest.mark.system
@pytest.mark.parametrize("client", [openai_asks, langchain_asks, our_client_asks])
def test_clients_with_their_defaults(tmp_path: Path, client: Callable[[Http], Ask]) -> None:
    """Eight at once, a row and a queue of two: with a hint of 0.1 s five of them failed."""

    async def main() -> None:
        limits = Limits(max_waiting_requests=2)
        async with serving(tmp_path, seconds=0.01, limits=limits, max_batch=1) as http:
            ask = client(http)
            for _ in range(3):
                await ask()
            found = await asyncio.gather(*(ask() for _ in range(8)), return_exceptions=True)
            lost = [each for each in found if isinstance(each, Exception)]
            assert len(lost) <= 1, lost  # one, if this machine stood still for a moment

    asyncio.run(main())
