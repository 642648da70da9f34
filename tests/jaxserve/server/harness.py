"""A server over the fake device and the byte tokenizer: everything but a model."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpc import aio

from jaxserve.chat import Chat
from jaxserve.cluster.transfer.handshake import Handshake
from jaxserve.engine.engine import Engine
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.engine.host.speculation import Proposer, Speculation
from jaxserve.engine.plan import StepOutput, StepPlan
from jaxserve.errors import RestartingError
from jaxserve.prompts import Prompts
from jaxserve.server.core.engine_thread import EngineThread
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.service import Observer, Service
from jaxserve.server.core.ttft_estimate import Forecast
from jaxserve.server.disaggregation.roles import Role
from jaxserve.server.grpc.admin import AdminServicer
from jaxserve.server.grpc.inference import InferenceServicer
from jaxserve.server.grpc.server import Face, Health, bind, new_server
from jaxserve.server.observe.profiler import Profiler
from jaxserve.server.readiness import Gate
from jaxserve.server.security.auth import Tokens
from jaxserve.server.serving_state import EngineCard, ModelCard, Served
from jaxserve.structure.grammars import Grammars
from jaxserve.v1.admin_pb2_grpc import AdminServiceStub
from jaxserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.byte_tokenizer import ByteTokenizer
from tests.fake_runner import FakeRunner
from tests.jaxserve.engine.host.driver import DRAFTED, config_of

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MODEL = ModelCard(
    "fake", "Fake", 0, "int32", ByteTokenizer.vocab_size, 512, ByteTokenizer.eos_ids, True
)
ENGINE = EngineCard({"jaxserve": "0"}, {"data": 1}, "fake", [], 4, 16, 4, 2048)


class SlowRunner(FakeRunner):
    """The fake device with a clock: a step takes so long. hook: called before each launch."""

    def __init__(self, *args: Any, seconds: float = 0.0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.seconds, self.steps = seconds, 0
        self.launches: Counter[str] = Counter()  # by the client's request id
        self.names: Callable[[int], str] = str  # of a sequence's request
        self.hook: Callable[[int], None] = lambda number: None

    def launch(self, plan: StepPlan) -> StepOutput:
        self.steps += 1
        self.launches.update(
            self.names(sequence) for lane in plan.lanes for sequence in lane.sequences
        )
        self.hook(self.steps)
        return super().launch(plan)

    def collect(self, plan: StepPlan, handle: StepOutput) -> StepOutput:
        time.sleep(self.seconds)
        return super().collect(plan, handle)


@dataclass
class Running:
    """A server that answers, and what is behind it."""

    service: Service
    engine: Engine
    runner: SlowRunner
    gate: Gate
    address: str
    channel: aio.Channel
    served: Served
    health: Health
    stop: Callable[[float], Awaitable[None]]
    open: Callable[[], None]
    failed: Callable[[BaseException], None] | None = None  # instead of telling everybody
    drain: Callable[[], None] = lambda: None  # what the call Drain does
    failures: list[BaseException] = field(default_factory=list)

    @property
    def inference(self) -> InferenceServiceStub:
        return InferenceServiceStub(self.channel)

    @property
    def admin(self) -> AdminServiceStub:
        return AdminServiceStub(self.channel)

    async def at_rest(self, seconds: float = 5.0) -> None:
        """Wait until nothing runs, and check that everything was given back."""
        until = time.monotonic() + seconds
        while self.service.in_flight or self.engine.has_work or self.service.loads.pages_used:
            assert time.monotonic() < until, (
                self.service.in_flight,
                self.engine.has_work,
                self.service.loads,
            )
            await asyncio.sleep(0.002)
        self.engine.scheduler.check_invariants()
        assert not (self.service.waiting_tokens or self.service._waiting or self.service._timers)


@asynccontextmanager
async def running(
    folder: Path,
    *,
    limits: Limits | None = None,
    tokens: Tokens | None = None,
    seconds: float = 0.0,
    opened: bool = True,
    observers: tuple[Observer, ...] = (),
    faces: Callable[[Gate], tuple[Face, ...]] = lambda gate: (),
    new_role: Callable[[Gate], Role] = lambda gate: Role(),
    handshake: Handshake | None = None,
    proposer: Proposer | None = None,
    **config: Any,
) -> AsyncIterator[Running]:
    """folder: an empty one. seconds: of one step of the device. config: of the engine (see
    `config_of`).

    proposer: of drafts. handshake: of an engine that exchanges pages.
    """
    limits = limits or Limits()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    sizes = {
        "max_context": 512,
        "num_pages": 512,
        "step_tokens": 64,
        "page_exchange": handshake is not None,
    }
    configured = config_of(**sizes | config)
    if proposer:
        configured = replace(configured, speculate="ngram", draft_tokens=DRAFTED)
    runner = SlowRunner(
        configured, seconds=seconds, mask_bytes=-(-ByteTokenizer.vocab_size // 32) * 4
    )
    scheduler = Scheduler(
        configured, speculation=Speculation(proposer, DRAFTED) if proposer else None
    )
    runner.names = lambda sequence: scheduler._sequences[sequence].request.id.split("#")[0]
    engine = Engine(scheduler, runner, pages=runner if handshake else None)
    loop = asyncio.get_running_loop()

    def drain() -> None:
        found.drain()

    def failed(error: BaseException) -> None:
        found.failures.append(error)
        if found.failed:
            return found.failed(error)
        gate.fail()
        service.fail_all(RestartingError("the engine has failed"))

    thread = EngineThread(
        engine,
        lambda news: loop.call_soon_threadsafe(service.take, news) and None,
        lambda error: loop.call_soon_threadsafe(failed, error) and None,
    )
    tokenizer = ByteTokenizer()
    prompts = Prompts(
        tokenizer,
        Chat(folder, tokenizer),
        tokenizer.eos_ids,
        tokenizer.vocab_size,
        configured.max_context,
        engine.scheduler.max_tokens,
        Grammars(tokenizer, tokenizer.eos_ids, tokenizer.vocab_size, limits.grammars),
        configured.embeds,
    )
    gate = Gate()
    role = new_role(gate)
    handover, forecast = (
        role.remote_prefill(thread, configured.page_size),
        Forecast(configured.step_tokens),
    )
    service = Service(prompts, thread, forecast, limits, observers, handover, role.for_servers)
    others = (*faces(gate), *role.faces)
    health = Health(True, True, *others)
    gate.changed = health.tell
    admin = AdminServicer(gate, Profiler(None), drain)
    server = new_server(limits, tokens or Tokens(), health, InferenceServicer(gate), admin, *others)
    port = bind(server, "127.0.0.1", 0, None, "--port")
    await server.start()
    model = replace(MODEL, embedding_dimensions=2 if configured.embeds else 0)
    served = Served(service, thread, model, ENGINE, lambda: 0, handshake=handshake)

    def open_gate() -> None:
        thread.start()
        role.open(handshake)
        gate.open(served)

    async def stop(grace: float) -> None:
        health.close()
        await server.stop(grace)

    address = f"127.0.0.1:{port}"
    try:
        async with aio.insecure_channel(address) as channel:
            found = Running(
                service, engine, runner, gate, address, channel, served, health, stop, open_gate
            )
            if opened:
                open_gate()
            yield found
    finally:
        await server.stop(0)
        await role.close()
        assert thread.close()
        service.close()
        prompts.chat.close()
        prompts.grammars.close()
