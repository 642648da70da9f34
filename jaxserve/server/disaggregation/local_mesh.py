"""Prompts computed on one mesh of this process, and decoded on another one."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from jaxserve.cluster.transfer.prefill import Prompt
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.host.kv_export import PagesToSend
from jaxserve.engine.host.kv_import import KVImport, StagedPages
from jaxserve.errors import ConfigError
from jaxserve.server.core.engine_thread import EngineThread
from jaxserve.server.disaggregation.flags import Meshes
from jaxserve.server.disaggregation.metrics import DecodeMetrics
from jaxserve.server.disaggregation.prefill_source import departing
from jaxserve.server.disaggregation.prefix_affinity import Blocks
from jaxserve.server.disaggregation.remote_prefill import Handover
from jaxserve.server.disaggregation.roles import Role
from jaxserve.server.serving_state import PrefillEngine
from sharding.mesh import MeshSpec, ShardingError

Bring = Callable[
    [KVImport, PagesToSend, float], Iterator[StagedPages]
]  # with the seconds that it may wait


@dataclass(frozen=True)
class Place:
    """Where a model is loaded. flag: that says so. prefills: prompts are computed there, and
    nothing else.
    """

    mesh: MeshSpec
    devices: Sequence[Any]
    flag: str
    prefills: bool = False

    @contextmanager
    def named(self) -> Iterator[None]:
        """Around what may find that the model does not fit there: the error has the flag."""
        try:
            yield
        except ShardingError as error:
            raise ShardingError(f"{self.flag}: {error}") from None


def places(meshes: Meshes, devices: Sequence[Any]) -> tuple[Place, Place]:
    """For prefill the first of the devices, for decode the next. ConfigError when there are too
    few.
    """
    first, second = meshes.prefill, meshes.decode
    if len(devices) < first + second:
        raise ConfigError(
            f"--prefill-mesh {first} and --decode-mesh {second} need {first + second} devices; "
            f"{len(devices)} are "
            "present (lower one of them)"
        )
    return (
        Place(MeshSpec(tensor=first), devices[:first], f"--prefill-mesh {first}", prefills=True),
        Place(MeshSpec(tensor=second), devices[first : first + second], f"--decode-mesh {second}"),
    )


@dataclass(frozen=True)
class Moving:
    """An Arrival that lies on the other mesh. bring: how it comes."""

    outgoing: PagesToSend
    bring: Bring

    @property
    def nbytes(self) -> int:
        return self.outgoing.nbytes

    def stage(self, arriving: KVImport, timeout: float) -> Iterator[StagedPages]:
        return self.bring(arriving, self.outgoing, timeout)


def through_host(
    arriving: KVImport, outgoing: PagesToSend, timeout: float
) -> Iterator[StagedPages]:
    """Of pages whose heads have to be dealt out anew."""
    return arriving.stage(outgoing.to_host(), timeout)


class PrefillMesh:
    """The engine of the other mesh: a Prefiller, and the pool that has no other.

    direct: pages go from device to device, since a shard has as many of the model's kv heads on
    either mesh.
    """

    name = "the prefill mesh"

    def __init__(self, engine: PrefillEngine, decodes: DeviceRunner):
        """decodes: on whose mesh the pages are wanted."""
        self._engine = engine
        self.direct = engine.runner.pages.transfer_format == decodes.pages.transfer_format

    @property
    def way(self) -> str:
        """That pages go, in words."""
        return (
            "from device to device"
            if self.direct
            else "through the host: kv heads are shared out differently"
        )

    @property
    def ready(self) -> "tuple[PrefillMesh]":
        return (self,)

    @property
    def queue(self) -> int:
        return self._engine.service.waiting_tokens

    def cached(self, blocks: Blocks) -> int:
        """Nobody else is there to be preferred."""
        return 0

    def ending(self, limit: asyncio.Timeout) -> AbstractContextManager[None]:
        """See Prefiller; the process ends with it."""
        return nullcontext()

    async def arrivals(self, prompt: Prompt, deadline: float) -> AsyncGenerator[Moving, None]:
        """See Prefiller."""
        engine, bring = self._engine, KVImport.move if self.direct else through_host
        seconds = deadline - asyncio.get_running_loop().time()
        async with departing(
            engine.service, engine.thread, prompt, seconds, not self.direct
        ) as departure:
            while outgoing := await departure.next():
                try:
                    yield Moving(outgoing, bring)
                finally:
                    departure.drop(outgoing)


class DecodeMeshRole(Role):
    """It hands long prompts over to the other mesh."""

    def __init__(self, meshes: Meshes, prefill: PrefillMesh, registry: CollectorRegistry):
        self._meshes, self._prefill = meshes, prefill
        self._metrics = DecodeMetrics(registry)

    def handover(self, thread: EngineThread, page_size: int) -> Handover:
        meshes = self._meshes
        return Handover(
            thread, page_size, self._prefill, meshes.policy, meshes.seconds, self._metrics
        )
