"""Two engines on two meshes of one process."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex

from prometheus_client import CollectorRegistry

from jaxserve import LLM
from jaxserve.completion import Completion
from jaxserve.engine.engine import Engine
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.service import Service
from jaxserve.server.disaggregation.flags import Meshes
from jaxserve.server.disaggregation.local_mesh import DecodeMeshRole, PrefillMesh
from jaxserve.server.disaggregation.policy import Policy
from jaxserve.server.observe.metrics import PREFIX
from jaxserve.server.process import ServerProcess
from jaxserve.server.serving_state import PrefillEngine

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@dataclass(frozen=True)
class Joined:
    """Two engines of one process: `prefill` computes the long prompts of `service`.

    engines: the one that prefills, and the one that decodes. salt: of all prompts, so that those of
    other tests are not found in the prefix caches.
    """

    service: Service
    prefill: PrefillEngine
    mesh: PrefillMesh
    engines: tuple[Engine, Engine]
    registry: CollectorRegistry
    salt: str = field(default_factory=partial(token_hex, 8))

    async def ask(
        self, prompt: tuple[int, ...], params: SamplingParams = GREEDY, salt: str = ""
    ) -> list[Completion]:
        with await self.service.answer(
            IncomingRequest(prompt=prompt, params=params, cache_salt=self.salt + salt)
        ) as answer:
            return list((await answer.whole()).completions)

    def number(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"{PREFIX}disaggregation_{name}", labels) or 0.0

    async def at_rest(self) -> None:
        """Wait until nothing is left of any request, on either mesh."""
        async with asyncio.timeout(60):
            while (
                self.service.in_flight
                or self.prefill.service.in_flight
                or any(e.has_work for e in self.engines)
            ):
                await asyncio.sleep(0.01)
            while any(
                engine.transfers._exports or taken(engine.transfers.slots)
                for engine in self.engines
            ):
                await asyncio.sleep(0.01)
        for engine in self.engines:
            engine.scheduler.check_invariants()


def taken(room: threading.BoundedSemaphore) -> int:
    return room._initial_value - room._value  # type: ignore[attr-defined]


@asynccontextmanager
async def joined(prefill: LLM, decode: LLM, seconds: float = 600.0) -> AsyncIterator[Joined]:
    """Join two engines as `serve` does: prompts of 64 tokens and more are handed over.

    seconds: --transfer-timeout.
    """
    failures = list[BaseException]()
    registry = CollectorRegistry()
    before = prefill.runner.compiles_after_ready, decode.runner.compiles_after_ready
    process = ServerProcess(Limits())
    connected = process.connector.connect_llm(prefill, on_failure=failures.append)
    behind = PrefillEngine(*connected, prefill.runner)
    mesh = PrefillMesh(behind, decode.runner)
    assert mesh.direct == (prefill.model.mesh.size > 1)
    role = DecodeMeshRole(
        Meshes(1, 2, Policy(threshold=64, queue_tokens=2**15), seconds), mesh, registry
    )
    service, thread = process.connector.connect_llm(decode, role=role, on_failure=failures.append)
    for each in (behind.thread, thread):
        each.start()
    try:
        yield Joined(service, behind, mesh, (prefill.engine, decode.engine), registry)
    finally:
        service.close()
        behind.service.close()
        assert all([each.close() for each in (thread, behind.thread)])
        assert not failures
    assert (prefill.runner.compiles_after_ready, decode.runner.compiles_after_ready) == before
