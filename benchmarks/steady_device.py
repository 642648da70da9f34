"""A server's parts around a device that takes exactly so long for a step and computes nothing."""

import asyncio
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.host_path import NoDevice
from jaxserve.chat import Chat
from jaxserve.cli.flags import BUNDLED
from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.engine_thread import EngineThread, StepReport
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.engine.plan import StepOutput, StepPlan
from jaxserve.prompts import Prompts
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.service import Service
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.readiness import Readiness
from jaxserve.server.serving_state import EngineCard, ModelCard, ServingState
from jaxserve.structure.grammars import Grammars
from jaxserve.tokenizer import load_tokenizer

TOKEN = 300  # of the bundled tokenizer: one with text, for which every door writes a message


class SteadyDevice(NoDevice):
    """A device whose steps take `seconds`, and `prompt_seconds` for each token of a prompt.

    A step begins at the end of the one before, or at its launch if that is later.
    """

    def __init__(self, config: EngineConfig, seconds: float, prompt_seconds: float = 0.0):
        super().__init__(config)
        self._seconds = seconds
        self._prompt_seconds = prompt_seconds
        self._free = 0.0
        self._due: dict[int, float] = {}
        self.ends: list[float] = []

    def launch(self, plan: StepPlan) -> np.ndarray:
        prompt_tokens = plan.num_tokens if plan.kind == "prefill" else 0
        seconds = self._seconds + prompt_tokens * self._prompt_seconds
        self._free = max(self._free, time.monotonic()) + seconds
        self._due[plan.number] = self._free
        return super().launch(plan)

    def collect(self, plan: StepPlan, handle: np.ndarray) -> StepOutput:
        time.sleep(max(0.0, self._due.pop(plan.number) - time.monotonic()))
        self.ends.append(time.monotonic())
        output = super().collect(plan, handle)
        for lane in output.lanes:
            lane.tokens = [[TOKEN] * len(tokens) for tokens in lane.tokens]
        return output


@dataclass
class SteadyService:
    """The service on a device, with the bundled model's tokenizer, for servers of any protocol."""

    thread: EngineThread
    readiness: Readiness
    state: ServingState

    def open(self) -> None:
        """Take requests from now on."""
        gc.collect()
        gc.freeze()  # as serve does
        self.thread.start()
        self.readiness.set_ready(self.state)


def steady_service(
    config: EngineConfig,
    device: SteadyDevice,
    observe: Callable[[StepReport], None] = lambda report: None,
) -> SteadyService:
    """Return a service that lives on the running event loop.

    Args:
        observe: Function called on the engine's thread with the report of each step.
    """
    loop = asyncio.get_running_loop()
    tokenizer = load_tokenizer(BUNDLED)
    vocab_size = tokenizer.vocab_size
    engine = Engine(Scheduler(config), device)

    def deliver(report: StepReport) -> None:
        observe(report)
        loop.call_soon_threadsafe(service.take, report)

    def failed(error: BaseException) -> None:
        loop.call_soon_threadsafe(print, repr(error))

    thread = EngineThread(engine, deliver, failed)
    prompts = Prompts(
        tokenizer,
        Chat(BUNDLED, tokenizer),
        (),
        vocab_size,
        config.max_context,
        config.capacity,
        engine.scheduler.max_tokens,
        Grammars(tokenizer, (), vocab_size),
    )
    observers = (Metrics(lambda: 0),)
    service = Service(prompts, thread, config.max_batch, config.step_tokens, Limits(), observers)
    model = ModelCard("steady", "none", 0, "int32", vocab_size, config.max_context, (), False)
    engine_card = EngineCard({}, {}, "none", [], config.max_batch, 0, config.page_size, 0)
    state = ServingState(service, thread, model, engine_card, lambda: 0)
    return SteadyService(thread, Readiness(), state)
