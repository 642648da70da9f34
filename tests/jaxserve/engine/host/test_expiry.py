"""Requests that are too late to begin end, and their rows go to others."""

from dataclasses import replace

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.events import TokenEvent
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.errors import DeadlineError
from tests.fake_runner import FakeRunner
from tests.jaxserve.engine.host.driver import config_of, request


class Clocked:
    """An engine on the fake device, and the clock that it reads."""

    def __init__(self, **config: object):
        chosen = config_of(**config)  # type: ignore[arg-type]
        self.now = 0.0
        self.engine = Engine(Scheduler(chosen), FakeRunner(chosen), lambda: self.now)
        self.events: list[TokenEvent] = []

    def submit(self, name: str, start_by: float | None, **params: object) -> None:
        self.engine.submit(replace(request(name, **params), start_by=start_by))  # type: ignore[arg-type]

    def step(self, now: float) -> list[TokenEvent]:
        self.now = now
        found = self.engine.step()
        self.engine.scheduler.check_invariants()
        self.events += found
        return found

    def run(self) -> None:
        while self.engine.has_work:
            self.step(self.now)

    def late(self) -> list[tuple[str, int]]:
        """Return the choices that ended with DeadlineError, in order."""
        return [
            (event.request_id, event.index)
            for event in self.events
            if event.finish and isinstance(event.finish.error, DeadlineError)
        ]

    def answered(self) -> list[str]:
        return [e.request_id for e in self.events if e.finish and not e.finish.error]


def test_a_row_goes_to_the_first_that_can_still_use_it() -> None:
    clocked = Clocked(max_batch=1)
    clocked.submit("runs", None)
    clocked.submit("late", 1.0)
    clocked.submit("in time", 9.0)
    clocked.step(0.0)
    clocked.step(1.0)
    assert clocked.late() == [], "the last moment"
    clocked.step(1.5)
    assert clocked.late() == [("late", 0)]
    clocked.run()
    assert clocked.answered() == ["runs", "in time"]
    assert clocked.late() == [("late", 0)]


def test_every_choice_ends_that_has_not_begun() -> None:
    clocked = Clocked(max_batch=2)
    clocked.submit("many", 1.0, n=4, prompt=(1, 2, 3), max_tokens=20)
    for now in (0.0, 0.1, 0.2):
        clocked.step(now)
    clocked.step(2.0)
    clocked.run()
    assert clocked.late() == [("many", 2), ("many", 3)]
    assert clocked.answered() == ["many", "many"], "what has begun goes on"


def test_a_choice_may_wait_for_its_prompt() -> None:
    """Choice 0 computes the prompt until after the time at which it had to begin."""
    clocked = Clocked(max_batch=8, step_tokens=8)
    clocked.submit("long", 0.5, n=3, prompt=tuple(range(40)))
    now = 0.0
    while clocked.engine.has_work:
        clocked.step(now)
        now += 0.2
    assert clocked.answered() == ["long"] * 3 and not clocked.late()


@pytest.mark.parametrize("n, rows", [(3, 8), (3, 1)])
def test_a_choice_may_wait_for_one_that_has_ended(n: int, rows: int) -> None:
    """Choice 0 ends with its first token, and gives its row back."""
    clocked = Clocked(max_batch=rows, step_tokens=8)
    clocked.submit("short", 0.5, n=n, prompt=tuple(range(40)), max_tokens=1)
    for step in range(7):
        clocked.step(0.1 * step)
    assert "short" in clocked.answered()
    clocked.run()
    assert clocked.answered() == ["short"] * n and not clocked.late()


def test_limits_of_choices_that_are_gone_are_forgotten() -> None:
    clocked = Clocked(max_batch=2)
    for number in range(500):
        clocked.submit(str(number), 1e9, max_tokens=1)
        clocked.run()
    assert len(clocked.engine.scheduler.queue._start_limits) <= 100


def test_a_prompt_with_a_row_and_no_chunk_gives_the_row_back() -> None:
    """Its turn has not come, since the budget of the steps went to the prompt before it."""
    clocked = Clocked(max_batch=2, step_tokens=4, min_rows=2)
    clocked.submit("long", None, prompt=tuple(range(40)))
    clocked.submit("behind", 1.0, prompt=(50, 51, 52))
    clocked.step(0.0)
    clocked.step(2.0)
    assert clocked.late() == [("behind", 0)]
    clocked.run()
    assert clocked.answered() == ["long"]


def test_a_choice_that_has_begun_may_be_preempted_and_goes_on() -> None:
    clocked = Clocked(max_batch=2, num_pages=6)
    clocked.submit("first", None, max_tokens=12)
    clocked.submit("second", 1.0, max_tokens=12, prompt=tuple(range(30, 40)))
    for _ in range(4):
        clocked.step(0.5)
    clocked.now = 5.0
    clocked.run()
    assert clocked.engine.scheduler.preemptions > 0
    assert sorted(clocked.answered()) == ["first", "second"]


def test_an_id_is_free_when_its_end_was_handed_out() -> None:
    clocked = Clocked(max_batch=1)
    clocked.submit("runs", None)
    clocked.submit("late", 1.0)
    clocked.step(0.0)
    clocked.step(2.0)
    clocked.submit("late", None)
    clocked.run()
    assert clocked.answered() == ["runs", "late"]
