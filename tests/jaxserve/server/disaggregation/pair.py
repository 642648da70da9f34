"""Servers over real engines in one process, made and joined as serve.py makes and joins them: gRPC
over loopback.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax.sharding import Mesh

from jaxserve.cluster.transfer.handshake import Handshake
from jaxserve.completion import Completion
from jaxserve.engine.buckets import SEGMENTS_ON_DEVICE
from jaxserve.engine.engine import Engine
from jaxserve.engine.engine_thread import EngineThread
from jaxserve.errors import RestartingError
from jaxserve.llm import LLM
from jaxserve.request import Request
from jaxserve.server.cards import engine_card, handshake_of, model_card
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.service import Service
from jaxserve.server.disaggregation.flags import Disaggregation
from jaxserve.server.disaggregation.policy import Policy
from jaxserve.server.disaggregation.roles import role_of
from jaxserve.server.flags import ServeOptions
from jaxserve.server.observe.metrics import PREFIX, Metrics
from jaxserve.server.options import AddressOptions
from jaxserve.server.process import ServerProcess
from jaxserve.server.serving_state import ServingState
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine.host.checks import check_rest
from tests.jaxserve.server.harness import until


@dataclass(frozen=True)
class MeshFrom(MeshSpec):
    """A mesh that leaves the first devices to others, so that no device runs the collectives of two
    engines.
    """

    first: int = 0

    def build(self, devices: Sequence[Any]) -> Mesh:
        return super().build(devices[self.first :])


def compile_largest(llm: LLM) -> None:
    """The largest step of each kind, which holds whatever the others hold; nobody asks for scores
    of prompts.
    """
    largest = {
        (b.kind, b.steps): b for b in sorted(llm.runner.buckets.buckets) if b.kind != "score"
    }
    llm.runner.warm_up(largest.values())
    llm.prompts.grammars.warm_up()


@dataclass(frozen=True)
class Server:
    """One that is ready. address: of its gRPC."""

    llm: LLM
    service: Service
    thread: EngineThread
    metrics: Metrics
    address: str

    async def ask(self, call: IncomingRequest) -> tuple[Request, tuple[Completion, ...]]:
        """What the engine was given, and all that it said."""
        with await self.service.answer(call) as answer:
            return answer.prepared.request, (await answer.whole()).completions

    async def ask_all(
        self, calls: Sequence[IncomingRequest], at_once: int
    ) -> list[tuple[Request, tuple[Completion, ...]]]:
        """In the order of the calls; so many of them are under way at any time."""
        free = asyncio.Semaphore(at_once)

        async def one(call: IncomingRequest) -> tuple[Request, tuple[Completion, ...]]:
            async with free:
                return await self.ask(call)

        return await asyncio.gather(*map(one, calls))

    async def cached(self, prompt: Sequence[int]) -> int:
        """Tokens of the prompt that the engine would find in its prefix cache."""

        def look(engine: Engine) -> int:
            return engine.transfers.receive(prompt).cached

        return await asyncio.wrap_future(self.thread.call(look))

    def number(self, name: str, **labels: str) -> float:
        """Of a metric."""
        found = self.metrics.registry.get_sample_value(PREFIX + name, labels)
        assert found is not None, f"there is no metric {name} {labels}"
        return found

    def total(self, name: str) -> float:
        """Of all samples of a counter, whatever their labels."""
        metrics = self.metrics.registry.collect()
        return sum(s.value for metric in metrics for s in metric.samples if s.name == PREFIX + name)

    async def at_rest(self) -> None:
        """Everything was given back: rows, pages, buffers. And nothing was compiled all the
        while."""
        engine = self.llm.engine
        await until(
            lambda: not (self.service.in_flight or engine.has_work or engine.transfers._exports)
        )
        await asyncio.wrap_future(self.thread.call(lambda engine: check_rest(engine.scheduler)))
        assert self.service.waiting_tokens == 0 and not self.service._timers
        assert self.number("compiles_after_ready") == 0
        if self.llm.runner.config.page_exchange:
            assert self.number("disaggregation_buffer_bytes") == 0
            assert engine.transfers.slots._value == SEGMENTS_ON_DEVICE  # type: ignore[attr-defined]


@asynccontextmanager
async def serving(
    llm: LLM, plan: Disaggregation | None = None, handshake: Handshake | None = None
) -> AsyncIterator[Server]:
    """A server of this model. plan: None for one that computes its own prompts."""
    process = ServerProcess(Limits(), new_role=partial(role_of, plan))
    failures = list[BaseException]()

    def failed(error: BaseException) -> None:
        failures.append(error)
        service.fail_all(RestartingError("the engine has failed"))

    before = llm.runner.compiles_after_ready  # those of other engines of this process

    def compiles() -> int:
        return llm.runner.compiles_after_ready - before

    metrics = process.metrics
    service, thread = process.connector.connect_llm(llm, (metrics,), on_failure=failed)
    options = ServeOptions(addresses=AddressOptions(port=0, http=False))
    await process.listeners.start(options, process.lifecycle.drain, failed)
    thread.start()
    process.readiness.set_ready(
        ServingState(
            service,
            thread,
            model_card(llm, "tiny"),
            engine_card(llm),
            compiles,
            handshake=handshake,
        )
    )
    process.role.open(handshake)
    try:
        port = process.listeners.ports["gRPC"]
        yield Server(llm, service, thread, metrics, f"127.0.0.1:{port}")
    finally:
        await process.role.close()
        await process.listeners.stop(0)
        assert thread.close() and not failures, failures
        service.close()


@asynccontextmanager
async def joined(prefill: LLM, decode: LLM, threshold: int) -> AsyncIterator[tuple[Server, Server]]:
    """A prefill server, and a decode server that hands prompts over to it. threshold:
    --prefill-threshold.
    """

    def plan(role: str, *servers: str) -> Disaggregation:
        return Disaggregation(
            role=role,
            servers=servers,
            servers_file=None,
            policy=Policy(threshold, queue_tokens=2**15),
            buffer=2**24,
            seconds=60.0,
        )

    handshakes = [handshake_of(llm) for llm in (prefill, decode)]  # before anybody is ready
    async with (
        serving(prefill, plan("prefill"), handshakes[0]) as one,
        serving(decode, plan("decode", one.address), handshakes[1]) as other,
    ):
        await until(lambda: other.number("disaggregation_prefill_servers", state="ready"))
        yield one, other
