"""The prefill servers that a decode server may hand prompts to: watched all the time, added and
removed at any time.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from enum import StrEnum

from grpc import aio  # type: ignore[attr-defined]

from jaxserve.cluster.transfer.prefill import PrefillClient, Prompt
from jaxserve.cluster.transfer.ticket import TransferError
from jaxserve.engine.host.kv_import import KVImport, StagedPages
from jaxserve.engine.kv_segment import KVSegment
from jaxserve.server.disaggregation.prefix_affinity import Blocks, Handed, blocks_of

AGAIN = 1.0  # seconds until a server that is not there is asked again
REST = 5.0  # seconds without prompts for one that failed with one
FAILING = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL", "UNKNOWN")  # not the prompt's fault
log = logging.getLogger(__name__)


class State(StrEnum):
    """As metrics name it."""

    READY = "ready"
    REFUSING = "refusing"  # it is there, and cannot compute prompts for this server
    UNREACHABLE = "unreachable"  # or not heard of yet


@dataclass(frozen=True)
class Received:
    """An Arrival that came over a network."""

    piece: KVSegment

    @property
    def nbytes(self) -> int:
        return self.piece.nbytes

    def stage(self, arriving: KVImport, timeout: float) -> Iterator[StagedPages]:
        return arriving.stage(self.piece, timeout)


class PrefillServer:
    """One of them, a Prefiller. From `open` to `close` it is watched."""

    def __init__(self, address: str, channel: aio.Channel, client: PrefillClient):
        self.address = address
        self.state = State.UNREACHABLE
        self._told: State | None = None
        self._channel, self._client = channel, client
        self._handed, self._waiting, self._running = Handed(), 0, 0  # of the latter two: tokens
        self._limits = set[asyncio.Timeout]()
        self._rests_until = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self._watching: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._watching = asyncio.create_task(self._watch())

    async def close(self, grace: float) -> None:
        """Prompts that it computes have so many seconds. Until then its channel is open: each piece
        is a call.
        """
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            if grace:
                log.warning(
                    "prefill server %s is removed: prompts did not come in %g s",
                    self.address,
                    grace,
                )
        finally:
            if self._watching:
                self._watching.cancel()
            await self._channel.close()

    @property
    def name(self) -> str:
        return f"prefill server {self.address}"

    @property
    def ready(self) -> bool:
        """Whether it would take a prompt now."""
        return self.state is State.READY and time.monotonic() >= self._rests_until

    # ---- as a Candidate

    @property
    def queue(self) -> int:
        """What it told last, or what it was handed since: the one is old, the other not all of
        it."""
        return max(self._waiting, self._running)

    def cached(self, blocks: Blocks) -> int:
        return self._handed.cached(blocks)

    # ---- prompts

    async def arrivals(self, prompt: Prompt, deadline: float) -> AsyncGenerator[Received, None]:
        """See PrefillClient.pieces."""
        with self._counted(len(prompt.token_ids) - prompt.start), self._judged():
            async with aclosing(self._client.pieces(prompt, deadline)) as pieces:
                async for piece in pieces:
                    yield Received(piece)
        self._handed.add(blocks_of(prompt.token_ids, prompt.salt))

    @contextmanager
    def _judged(self) -> Iterator[None]:
        """Around a prompt: who fails with one would fail with the next, and nobody has a shorter
        queue.
        """
        try:
            yield
        except TransferError as error:
            if error.code == "DATA_LOSS" or (error.remote and error.code in FAILING):
                self._rests_until = time.monotonic() + REST
            raise

    @contextmanager
    def _counted(self, tokens: int) -> Iterator[None]:
        self._running += tokens
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= tokens
            if not self._running:
                self._idle.set()

    @contextmanager
    def ending(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Around waiting for it: when it falls silent, the time is over."""
        self._limits.add(limit)
        try:
            yield
        finally:
            self._limits.discard(limit)

    # ---- watching

    async def _watch(self) -> None:
        while True:
            try:
                await self._listen()
            except TransferError as error:
                refused = error.code in (
                    "FAILED_PRECONDITION",
                    "UNAUTHENTICATED",
                    "PERMISSION_DENIED",
                    "UNIMPLEMENTED",
                )
                self._turn(State.REFUSING if refused else State.UNREACHABLE, str(error))
                if (
                    error.code == "DEADLINE_EXCEEDED"
                ):  # a server that drains says so, and finishes what it has
                    self._end_all()
            except Exception:
                log.exception("prefill server %s: watching it failed", self.address)
                self._turn(State.UNREACHABLE, "watching it failed")
            await asyncio.sleep(AGAIN)

    async def _listen(self) -> None:
        async with aclosing(self._client.loads()) as loads:
            async for self._waiting in loads:
                self._turn(State.READY, "")

    def _end_all(self) -> None:
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0)

    def _turn(self, state: State, why: str) -> None:
        if state is not self._told:
            level = logging.INFO if state is State.READY else logging.WARNING
            log.log(
                level, "prefill server %s is %s%s", self.address, state, f": {why}" if why else ""
            )
        if state is State.READY and self.state is not State.READY:
            self._handed = Handed()  # it may have started anew
        self.state = self._told = state


class PrefillPool:
    """grace: seconds that a prompt may still take when its server is removed."""

    def __init__(self, grace: float):
        self._grace = grace
        self._servers: dict[str, PrefillServer] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> list[PrefillServer]:
        return [server for server in self._servers.values() if server.ready]

    @property
    def states(self) -> Counter[State]:
        return Counter(server.state for server in self._servers.values())

    def change(self, connect: Callable[[str], PrefillServer], addresses: Iterable[str]) -> None:
        """Have these from now on. connect: makes a server of an address."""
        wanted = set(addresses)
        for address in wanted - self._servers.keys():
            self._servers[address] = server = connect(address)
            server.open()
        for address in self._servers.keys() - wanted:
            task = asyncio.create_task(self._servers.pop(address).close(self._grace))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        servers, self._servers = list(self._servers.values()), {}
        for task in self._closing:
            task.cancel()
        await asyncio.gather(
            *self._closing, *(server.close(0) for server in servers), return_exceptions=True
        )
