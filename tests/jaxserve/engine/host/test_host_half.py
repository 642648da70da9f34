"""The host half as a whole: it imports no jax, and runs for long without losing anything."""

import random
import subprocess
import sys
from pathlib import Path

from jaxserve.engine.engine import Engine
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.engine.host.speculation import Speculation
from jaxserve.request import Request, SamplingParams
from tests.fake_runner import FakeRunner
from tests.jaxserve.engine.host.checks import check_rest
from tests.jaxserve.engine.host.driver import ScriptedProposer, config_of

HOST_HALF = (
    "jaxserve jaxserve.config jaxserve.request jaxserve.errors jaxserve.completion "
    "jaxserve.tokenizer jaxserve.engine jaxserve.engine.plan jaxserve.engine.host.page_pool "
    "jaxserve.engine.host.prefix_cache jaxserve.engine.host.sequence jaxserve.engine.host.lane "
    "jaxserve.engine.host.scheduler jaxserve.engine.engine jaxserve.engine.buckets "
    "jaxserve.engine.events jaxserve.engine.request_limits"
).split()
WITHOUT_JAX = """
import importlib, sys
sys.modules.update(jax=None, jaxlib=None)
for module in sys.argv[1:]:
    importlib.import_module(module)
"""
STEPS = 100_000


def test_the_host_half_imports_where_there_is_no_jax() -> None:
    root = Path(__file__).parents[4]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX, *HOST_HALF], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    probe = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX, "jax"], cwd=root, capture_output=True, text=True
    )
    assert probe.returncode != 0, "the probe would not have noticed"


class Traffic:
    """Short requests of all sorts without end, many with a common prefix."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.draw = random.Random(0)
        self.live: dict[tuple[str, int], int] = {}  # tokens so far, by request and choice
        self.submitted = self.ended = 0

    def arrive(self) -> None:
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


def test_a_hundred_thousand_steps_leak_nothing() -> None:
    config = config_of(max_batch=3, step_tokens=8, page_size=2, num_pages=16, max_context=24)
    scheduler = Scheduler(config, speculation=Speculation(ScriptedProposer(2), max_drafts=2))
    engine = Engine(
        scheduler,
        FakeRunner(config, spoils=lambda number, lane, row: number % 997 == row),
        clock=lambda: 1.0,
    )
    traffic = Traffic(engine)
    for number in range(STEPS):
        while len(scheduler.waiting) < 2:
            traffic.arrive()
        traffic.step()
        if number % 500 == 0:
            scheduler.check_invariants()
            assert len(traffic.live) <= 8, "a choice is forgotten"
    while engine.has_work:
        traffic.step()
    assert not traffic.live and traffic.ended > STEPS // 10
    check_rest(scheduler)
    assert len(scheduler.lanes[0].caches[0]) <= config.pools[0].pages
