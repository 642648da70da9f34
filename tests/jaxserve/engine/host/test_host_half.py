"""The host half as a whole: it needs no jax, and it runs for long without losing anything."""

import random

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.engine.host.speculation import Speculation
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.fake_runner import FakeRunner
from tests.jaxserve.engine.host.checks import check_rest
from tests.jaxserve.engine.host.driver import ScriptedProposer, config_of


class Traffic:
    """An endless load of short random requests, many of which share a prefix."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.draw = random.Random(0)
        self.live: dict[tuple[str, int], int] = {}  # tokens so far, by request and choice
        self.submitted = self.ended = 0

    def submit_request(self) -> None:
        draw = self.draw
        prompt = (
            *range(draw.choice((3, 4, 8))),
            *(draw.randrange(97) for _ in range(draw.randrange(1, 4))),
        )
        params = SamplingParams(
            seed=self.submitted,
            n=draw.choice((1, 1, 1, 2)),
            max_tokens=draw.randrange(1, 8),
            repetition_penalty=draw.choice((1.0, 1.5)),
            prompt_logprobs=draw.choice((None, None, None, 0)),
        )
        name = str(self.submitted)
        salt = draw.choice(("", "", "w"))
        self.engine.submit(
            Request(
                id=name,
                prompt=prompt,
                params=params,
                eos_ids=(7, 55),
                salt=salt,
                priority=draw.randrange(2),
            )
        )
        self.live |= {(name, index): 0 for index in range(params.n)}
        self.submitted += 1

    def step(self) -> None:
        for event in self.engine.step():
            choice = event.request_id, event.index
            self.live[choice] += len(event.tokens)
            if event.finish:
                del self.live[choice]  # KeyError for a second end
                self.ended += 1
        if self.live and self.draw.random() < 0.02:
            self.engine.abort(self.draw.choice(list(self.live))[0])


@pytest.mark.parametrize("steps", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_steps_leak_nothing(steps: int) -> None:
    config = config_of(max_batch=3, step_tokens=8, page_size=2, num_pages=16, max_context=24)
    scheduler = Scheduler(config, speculation=Speculation(ScriptedProposer(2), max_drafts=2))
    engine = Engine(
        scheduler,
        FakeRunner(config, spoils=lambda number, lane, row: number % 997 == row),
        clock=lambda: 1.0,
    )
    traffic = Traffic(engine)
    for number in range(steps):
        while len(scheduler.waiting) < 2:
            traffic.submit_request()
        traffic.step()
        if number % 500 == 0:
            scheduler.check_invariants()
            assert len(traffic.live) <= 8, "somebody is forgotten"
    while engine.has_work:
        traffic.step()
    assert not traffic.live and traffic.ended > steps // 10
    check_rest(scheduler)
    assert len(scheduler.lanes[0].caches[0]) <= config.pools[0].pages
