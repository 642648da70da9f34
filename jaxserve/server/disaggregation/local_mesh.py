"""Compute prompts on one mesh of this process, and decode on another."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from jaxserve.cluster.transfer.prefill import PrefillPrompt
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.host.kv_export import PagesToSend
from jaxserve.engine.host.kv_import import KVImport, StagedPages
from jaxserve.errors import ConfigError
from jaxserve.server.disaggregation.flags import Meshes
from jaxserve.server.disaggregation.metrics import DecodeMetrics
from jaxserve.server.disaggregation.prefill_source import exporting
from jaxserve.server.disaggregation.prefix_affinity import Blocks
from jaxserve.server.disaggregation.remote_prefill import RemotePrefill
from jaxserve.server.disaggregation.roles import Role
from jaxserve.server.serving_state import PrefillEngine
from jaxserve.sharding.mesh import MeshSpec, ShardingError


@dataclass(frozen=True)
class Place:
    """The devices of one of the two models.

    `flag` is the flag with its value, for errors. `prefills` marks the mesh that computes prompts
    and nothing else.
    """

    mesh: MeshSpec
    devices: Sequence[Any]
    flag: str
    prefills: bool = False

    @contextmanager
    def named(self) -> Iterator[None]:
        """Put the flag before a ShardingError of the block: the model does not fit this mesh."""
        try:
            yield
        except ShardingError as error:
            raise ShardingError(f"{self.flag}: {error}") from None


def places(meshes: Meshes, devices: Sequence[Any]) -> tuple[Place, Place]:
    """Return the places for prefill, the first devices, and for decode, the next ones.

    ConfigError when there are too few devices.
    """
    prefill = meshes.prefill
    decode = meshes.decode
    if len(devices) < prefill + decode:
        raise ConfigError(
            f"--prefill-mesh {prefill} and --decode-mesh {decode} need {prefill + decode} "
            f"devices; {len(devices)} are present (lower one of them)"
        )
    return (
        Place(
            MeshSpec(tensor=prefill), devices[:prefill], f"--prefill-mesh {prefill}", prefills=True
        ),
        Place(
            MeshSpec(tensor=decode), devices[prefill : prefill + decode], f"--decode-mesh {decode}"
        ),
    )


@dataclass(frozen=True)
class DeviceTransfer:
    """`IncomingPages` that lie on the devices of the other mesh."""

    outgoing: PagesToSend
    direct: bool  # see PrefillMesh

    @property
    def nbytes(self) -> int:
        return self.outgoing.nbytes

    def stage(self, arriving: KVImport, timeout: float) -> Iterator[StagedPages]:
        if self.direct:
            return arriving.move(self.outgoing, timeout)
        return arriving.stage(self.outgoing.to_host(), timeout)


class PrefillMesh:
    """A `Prefiller` on another mesh of this process, and a `Pool` of just itself.

    Pages go directly from device to device (`direct`) if a shard holds equally many heads on both
    meshes, of keys and values and of recurrent states, else through the host's memory.
    """

    name = "the prefill mesh"

    def __init__(self, engine: PrefillEngine, decodes: DeviceRunner):
        """Connect the prefill engine to the runner whose mesh needs the pages."""
        self._engine = engine
        self.direct = engine.runner.pages.transfer_format == decodes.pages.transfer_format

    @property
    def transfer_path(self) -> str:
        """How pages travel, in words for the terminal."""
        if self.direct:
            return "from device to device"
        return "through the host: heads are shared out differently"

    @property
    def ready(self) -> "tuple[PrefillMesh]":
        return (self,)

    @property
    def queue(self) -> int:
        return self._engine.service.waiting_tokens

    def cached(self, blocks: Blocks) -> int:
        """Return 0: the number only compares prefillers, and there is one."""
        return 0

    def expiring(self, limit: asyncio.Timeout) -> AbstractContextManager[None]:
        """Do nothing: when this engine fails, the process ends."""
        return nullcontext()

    async def compute(
        self, prompt: PrefillPrompt, deadline: float
    ) -> AsyncGenerator[DeviceTransfer, None]:
        """Compute a prompt, see `Prefiller`."""
        engine = self._engine
        seconds = deadline - asyncio.get_running_loop().time()
        async with exporting(
            engine.service, engine.thread, prompt, seconds, to_host=not self.direct
        ) as export:
            while outgoing := await export.next():
                try:
                    yield DeviceTransfer(outgoing, self.direct)
                finally:
                    export.drop(outgoing)


class DecodeMeshRole(Role):
    """A server that has long prompts computed on another mesh of its process."""

    def __init__(self, meshes: Meshes, prefill: PrefillMesh, registry: CollectorRegistry):
        self._meshes = meshes
        self._prefill = prefill
        self._metrics = DecodeMetrics(registry)

    def remote_prefill(self, thread: EngineThread, page_size: int) -> RemotePrefill:
        meshes = self._meshes
        return RemotePrefill(
            thread, page_size, self._prefill, meshes.policy, meshes.seconds, self._metrics
        )
