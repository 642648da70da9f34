"""A service over the fake engine on a simulated clock: seconds pass when nothing is left to do."""

import asyncio
import random
import selectors
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.engine_thread import EngineThread, StepReport
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.engine.plan import StepOutput, StepPlan
from jaxserve.errors import DeadlineError, QueueFullError
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.core.client_rules import ANY_CLIENT, ClientRules
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.service import Service
from tests.byte_tokenizer import ByteTokenizer
from tests.fake_runner import FakeRunner
from tests.jaxserve.engine.host.driver import config_of
from tests.jaxserve.server.harness import new_prompts


@dataclass(frozen=True)
class Steps:
    """How long the steps of a device take."""

    empty: float = 0.005  # seconds of a step without tokens
    token: float = 0.0002  # seconds of each token
    spread: float = 0.0  # share of its time by which a step takes more or less
    stalls: float = 0.0  # share of steps that take four times as long


EVEN_STEPS = Steps()


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing else is ready."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._selector = _Jumps(self._selector, self)  # type: ignore[has-type]

    def time(self) -> float:
        return self.now


class _Jumps:
    """A selector that does not wait: it turns the clock instead."""

    def __init__(self, selector: selectors.BaseSelector, loop: SimulatedLoop):
        self._selector = selector
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        found = self._selector.select(0)
        if not found:
            assert timeout is not None, "everything waits, and nothing will happen"
            self._loop.now += timeout
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)


class TimedRunner(FakeRunner):
    """A fake device that says how long its last step takes."""

    def __init__(self, config: EngineConfig, steps: Steps):
        super().__init__(config)
        self.seconds = 0.0
        self._steps = steps
        self._draw = random.Random(2)

    def launch(self, plan: StepPlan) -> StepOutput:
        steps = self._steps
        tokens = sum(size for lane in plan.lanes for size in lane.sizes)
        seconds = steps.empty + steps.token * tokens
        seconds *= 1 + steps.spread * self._draw.uniform(-1, 1)
        self.seconds = seconds * (4 if self._draw.random() < steps.stalls else 1)
        return super().launch(plan)


class SimulatedThread(EngineThread):
    """An engine thread without a thread: each step is a timer of the event loop."""

    def __init__(self, engine: Engine, runner: TimedRunner, loop: SimulatedLoop):
        super().__init__(engine, self._take, self._fail, clock=loop.time)
        self._runner = runner
        self._event_loop = loop
        self._scheduled = False
        self.service: Service | None = None

    def _add(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        if not self._scheduled:
            self._scheduled = True
            self._event_loop.call_soon(self._go)

    def _go(self) -> None:
        while self._jobs:
            self._jobs.popleft()()
        self._runner.seconds = 0.0
        self._reports: deque[StepReport] = deque()
        self._step()
        self._event_loop.call_later(self._runner.seconds, self._end_step, self._reports)

    def _end_step(self, reports: deque[StepReport]) -> None:
        assert self.service
        for report in reports:
            self.service.take(report)
        if self._jobs or self._immediate or self._engine.has_work:
            self._go()
        else:
            self._scheduled = False

    def _take(self, report: StepReport) -> None:
        self._reports.append(report)

    def _fail(self, error: BaseException) -> None:
        raise error


@dataclass(frozen=True)
class Mix:
    """Requests of a load; each figure is drawn evenly from those that are given."""

    prompt_tokens: Sequence[int] = (30,)
    output_tokens: Sequence[int] = (64,)
    deadlines: Sequence[float] = (2.0,)
    choices: int = 1
    clients: int = 1  # that send them
    client: str = "client"  # first part of their names


@dataclass
class Outcomes:
    """What became of the requests of a load."""

    seconds: float
    sent: int = 0
    good: int = 0
    refused: int = 0  # with a time to come back
    late: int = 0  # with DeadlineError
    refusal_seconds: list[float] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        return self.good / self.seconds


class Simulation:
    """One server and its clients."""

    def __init__(
        self,
        folder: Path,
        rows: int = 16,
        limits: Limits | None = None,
        rules: ClientRules = ANY_CLIENT,
        steps: Steps = EVEN_STEPS,
        **config: Any,
    ):
        limits = limits or Limits()
        self.loop = SimulatedLoop()
        self.rows = rows
        sizes = {"max_context": 512, "num_pages": 4096, "step_tokens": 128} | config
        self.config: EngineConfig = config_of(max_batch=rows, page_size=4, **sizes)
        self.runner = TimedRunner(self.config, steps)
        self.engine = Engine(Scheduler(self.config), self.runner, self.loop.time)
        prompts = new_prompts(folder, self.engine, self.config, limits)
        thread = SimulatedThread(self.engine, self.runner, self.loop)
        self.service = Service(
            prompts,
            thread,
            rows,
            self.config.step_tokens,
            limits,
            (),
            rules=rules,
            clock=self.loop.time,
        )
        thread.service = self.service
        self.draw = random.Random(1)

    def close(self) -> None:
        self.service.close()
        self.loop.close()

    def run(self, load: Any) -> None:
        """Run a coroutine until it has ended, however long that is on the simulated clock."""
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(load)
        finally:
            asyncio.set_event_loop(None)

    def closed(self, mix: Mix, clients: int, seconds: float) -> Outcomes:
        """Keep so many requests in flight; a client that is refused comes back when it is told."""
        outcomes = Outcomes(seconds)
        end = self.loop.time() + seconds

        async def client() -> None:
            while self.loop.time() < end:
                await asyncio.sleep(await self.ask(mix, outcomes, end))

        async def clients_at_once() -> None:
            await asyncio.gather(*(client() for _ in range(clients)))

        self.run(clients_at_once())
        return outcomes

    def open(self, mix: Mix, rate: float, seconds: float) -> Outcomes:
        """Send requests at so many per second on average, as a Poisson process."""
        outcomes = Outcomes(seconds)
        end = self.loop.time() + seconds

        async def arrivals() -> None:
            async with asyncio.TaskGroup() as group:
                while self.loop.time() < end:
                    group.create_task(self.ask(mix, outcomes, end))
                    await asyncio.sleep(self.draw.expovariate(rate))

        self.run(arrivals())
        return outcomes

    async def ask(self, mix: Mix, outcomes: Outcomes, end: float) -> float:
        """Send a request, and return the seconds until its client may come back."""
        began = self.loop.time()
        timeout = self.draw.choice(mix.deadlines)
        number = self.draw.randrange(mix.clients) if mix.clients > 1 else 0
        incoming = IncomingRequest(
            prompt=[
                self.draw.randrange(1, ByteTokenizer.vocab_size - 1)
                for _ in range(self.draw.choice(mix.prompt_tokens))
            ],
            params=SamplingParams(
                max_tokens=self.draw.choice(mix.output_tokens), ignore_eos=True, n=mix.choices
            ),
            timeout=timeout,
            client=f"{mix.client} {number}",
            arrived=began,
        )
        outcomes.sent += 1
        try:
            answer = await self.service.answer(incoming)
            with answer:
                await answer.whole()
        except QueueFullError as error:
            outcomes.refused += 1
            outcomes.refusal_seconds.append(self.loop.time() - began)
            return error.retry_after or 0.0
        except DeadlineError:
            outcomes.late += 1
            return 0.0
        outcomes.good += self.loop.time() <= min(end, began + timeout)
        return 0.0
