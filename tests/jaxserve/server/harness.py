"""A server over the fake device and the byte tokenizer: everything but a model."""

import asyncio
import json
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpc import aio
from prometheus_client import CollectorRegistry

from jaxserve.chat import Chat
from jaxserve.cluster.transfer.handshake import Handshake
from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.engine.host.speculation import Proposer, Speculation
from jaxserve.engine.plan import StepOutput, StepPlan
from jaxserve.errors import RestartingError
from jaxserve.prompts import Prompts
from jaxserve.server.core.client_rules import ANY_CLIENT, ClientRules
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.request_observer import RequestObserver
from jaxserve.server.core.service import Service
from jaxserve.server.disaggregation.roles import Role
from jaxserve.server.flags import ServeOptions
from jaxserve.server.grpc.server import GrpcEndpoint
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.options import AddressOptions, CredentialOptions
from jaxserve.server.process import NewMetrics, ServerProcess
from jaxserve.server.readiness import Readiness
from jaxserve.server.security.auth import BearerTokens
from jaxserve.server.serving_state import EngineCard, ModelCard, ServingState
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
SIZES = {"max_context": 512, "num_pages": 512, "step_tokens": 64}  # by default
NO_FILES = CredentialOptions()
ENGINE = EngineCard({"jaxserve": "0"}, {"data": 1}, "fake", [], 4, 16, 4, 2048)


class SlowRunner(FakeRunner):
    """A fake device whose steps take `seconds`; `hook` is called before each launch."""

    def __init__(self, *args: Any, seconds: float = 0.0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.seconds = seconds
        self.steps = 0
        self.launches: Counter[str] = Counter()  # by the client's request id
        self.names: Callable[[int], str] = str  # of a sequence's request
        self.hook: Callable[[int], object] = lambda number: None

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
    """A server that answers, and its parts."""

    process: ServerProcess
    service: Service
    engine: Engine
    runner: SlowRunner
    channel: aio.Channel
    served: ServingState
    failed: Callable[[BaseException], None] | None = None  # in place of ending all requests
    drain: Callable[[], None] = lambda: None  # called by AdminService.Drain
    failures: list[BaseException] = field(default_factory=list)

    @property
    def readiness(self) -> Readiness:
        return self.process.readiness

    @property
    def address(self) -> str:
        """The address of gRPC."""
        return f"127.0.0.1:{self.process.listeners.ports['gRPC']}"

    @property
    def inference(self) -> InferenceServiceStub:
        return InferenceServiceStub(self.channel)

    @property
    def admin(self) -> AdminServiceStub:
        return AdminServiceStub(self.channel)

    def fail(self, error: BaseException) -> None:
        """Note a failure of the engine or of a listener, and end all requests."""
        self.failures.append(error)
        if self.failed:
            return self.failed(error)
        self.readiness.set_failed()
        self.service.fail_all(RestartingError("the engine has failed"))

    def open(self) -> None:
        """Become ready."""
        self.served.thread.start()
        self.process.role.open(self.served.handshake)
        self.readiness.set_ready(self.served)

    async def stop(self, grace: float) -> None:
        """Stop listening."""
        await self.process.listeners.stop(grace)

    @contextmanager
    def holding(self, step: int = 1) -> Iterator[Callable[[], None]]:
        """Let the device wait before its `step`-th step from now on, until the block ends.

        Yields a function that ends the wait earlier.
        """
        go_on = threading.Event()
        first = self.runner.steps + step
        self.runner.hook = lambda number: number >= first and go_on.wait()
        try:
            yield go_on.set
        finally:
            go_on.set()

    async def at_rest(self) -> None:
        """Wait until nothing runs, and check that everything was given back."""
        end = time.monotonic() + 60
        while self.service.in_flight or self.engine.has_work or self.service.loads.pages_used:
            assert time.monotonic() < end, (
                self.service.in_flight,
                self.engine.has_work,
                self.service.loads,
            )
            await asyncio.sleep(0.002)
        self.engine.scheduler.check_invariants()
        assert not (self.service.waiting_tokens or self.service._load.queue or self.service._timers)


def open_files() -> int:
    """Return the number of descriptors of this process, which is the server and its clients."""
    return len(os.listdir("/proc/self/fd"))


async def until(holds: Callable[[], object]) -> None:
    """Wait until a condition holds, a minute at most."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        await asyncio.sleep(0.002)


def new_engine(
    config: EngineConfig, proposer: Proposer | None, seconds: float
) -> tuple[Engine, SlowRunner]:
    """Make an engine over the fake device, with an optional proposer of drafts."""
    if proposer:
        config = replace(config, speculate="ngram", draft_tokens=DRAFTED)
    mask_bytes = -(-ByteTokenizer.vocab_size // 32) * 4
    runner = SlowRunner(config, seconds=seconds, mask_bytes=mask_bytes)
    speculation = Speculation(proposer, DRAFTED) if proposer else None
    scheduler = Scheduler(config, speculation=speculation)
    runner.names = lambda sequence: scheduler.queue.sequences[sequence].request.id.split("#")[0]
    return Engine(scheduler, runner, pages=runner if config.page_exchange else None), runner


def new_prompts(folder: Path, engine: Engine, config: EngineConfig, limits: Limits) -> Prompts:
    """Prompts of the byte tokenizer, with TEMPLATE as the chat template."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    tokenizer = ByteTokenizer()
    return Prompts(
        tokenizer,
        Chat(folder, tokenizer),
        tokenizer.eos_ids,
        tokenizer.vocab_size,
        config.max_context,
        config.capacity,
        engine.scheduler.max_tokens,
        Grammars(tokenizer, tokenizer.eos_ids, tokenizer.vocab_size, limits.grammars),
        config.embeds,
    )


@asynccontextmanager
async def running(
    folder: Path,
    *,
    limits: Limits | None = None,
    tokens: BearerTokens | None = None,
    seconds: float = 0.0,
    opened: bool = True,
    observers: tuple[RequestObserver, ...] = (),
    endpoints: Callable[[Readiness], tuple[GrpcEndpoint, ...]] = lambda readiness: (),
    new_role: Callable[[Readiness], Role] = lambda readiness: Role(),
    handshake: Handshake | None = None,
    proposer: Proposer | None = None,
    http: bool = False,
    admin_port: int | None = None,
    allowed_hosts: tuple[str, ...] = (),
    allowed_origins: tuple[str, ...] = (),
    credentials: CredentialOptions = NO_FILES,
    new_metrics: NewMetrics = Metrics,
    rules: ClientRules = ANY_CLIENT,
    **config: Any,
) -> AsyncIterator[Running]:
    """A server process over the fake device, listening for gRPC, and for HTTP if asked.

    folder: an empty one. seconds: duration of a step of the device. opened: ready from the start.
    endpoints: on the port of gRPC. admin_port, allowed_*, credentials: of the listeners.
    handshake: of an engine that exchanges pages. proposer: of drafts. new_metrics and
    rules: of the process. config: of the engine (see `config_of`).
    """
    limits = limits or Limits()
    configured = config_of(**SIZES | {"page_exchange": handshake is not None} | config)
    engine, runner = new_engine(configured, proposer, seconds)
    prompts = new_prompts(folder, engine, configured, limits)

    def failed(error: BaseException) -> None:
        server.fail(error)

    role = role_with(new_role, endpoints)
    process = ServerProcess(limits, tokens, role, new_metrics=new_metrics, rules=rules)
    service, thread = process.connector.connect(
        engine, prompts, configured, observers, on_failure=failed
    )
    model = replace(MODEL, embedding_dimensions=2 if configured.embeds else 0)
    state = ServingState(service, thread, model, ENGINE, lambda: 0, handshake=handshake)
    addresses = AddressOptions(
        port=0,
        http_port=0,
        http=http,
        admin_port=admin_port,
        allowed_hosts=allowed_hosts,
        allowed_origins=allowed_origins,
    )
    options = ServeOptions(addresses=addresses, credentials=credentials)
    await process.listeners.start(options, lambda: server.drain(), failed)
    address = f"127.0.0.1:{process.listeners.ports['gRPC']}"
    try:
        async with aio.insecure_channel(address) as channel:
            server = Running(process, service, engine, runner, channel, state)
            if opened:
                server.open()
            yield server
    finally:
        await process.listeners.stop(0)
        await process.role.close()
        assert thread.close()
        service.close()
        prompts.chat.close()
        prompts.grammars.close()


def role_with(
    new_role: Callable[[Readiness], Role],
    endpoints: Callable[[Readiness], tuple[GrpcEndpoint, ...]],
) -> Callable[[Readiness, CollectorRegistry], Role]:
    """Return the maker of a role that serves these endpoints in addition to its own."""

    def make(readiness: Readiness, registry: CollectorRegistry) -> Role:
        role = new_role(readiness)
        role.endpoints = (*endpoints(readiness), *role.endpoints)
        return role

    return make
