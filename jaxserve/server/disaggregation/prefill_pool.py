"""Prefill servers of a decode server: each watched all the time, added and removed at any time."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from enum import StrEnum

from grpc import aio  # type: ignore[attr-defined]

from jaxserve.cluster.transfer.prefill import PrefillClient, PrefillPrompt
from jaxserve.cluster.transfer.ticket import TransferError
from jaxserve.engine.host.kv_import import KVImport, StagedPages
from jaxserve.engine.kv_segment import KVSegment
from jaxserve.server.disaggregation.prefix_affinity import Blocks, PrefixAffinity, blocks_of

RETRY_SECONDS = 1.0  # until a server that cannot be reached is asked again
REST_SECONDS = 5.0  # without prompts, for a server that failed with one
# Failures that are the server's and not the prompt's: the next prompt would meet them too.
SERVER_FAILURES = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL", "UNKNOWN")
# Answers of a server that is there and will take no prompts of this one.
REFUSALS = ("FAILED_PRECONDITION", "UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED")
log = logging.getLogger(__name__)


class State(StrEnum):
    """State of a prefill server as far as known; the values are labels of a metric."""

    READY = "ready"
    REFUSING = "refusing"  # it is there, and cannot compute prompts for this server
    UNREACHABLE = "unreachable"  # or not heard of yet


@dataclass(frozen=True)
class FetchedPages:
    """`IncomingPages` that came over a network."""

    segment: KVSegment

    @property
    def nbytes(self) -> int:
        return self.segment.nbytes

    def stage(self, arriving: KVImport, timeout: float) -> Iterator[StagedPages]:
        return arriving.stage(self.segment, timeout)


class PrefillServer:
    """A `Prefiller` on the network. It is watched from `open` to `close`."""

    def __init__(self, address: str, channel: aio.Channel, client: PrefillClient):
        self.address = address
        self.state = State.UNREACHABLE
        self._logged: State | None = None
        self._channel = channel
        self._client = client
        self._affinity = PrefixAffinity()
        self._reported_tokens = 0  # waiting there, by its last report
        self._sent_tokens = 0  # of prompts that it computes for this server
        self._limits = set[asyncio.Timeout]()
        self._rests_until = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self._watching: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._watching = asyncio.create_task(self._watch())

    async def close(self, grace: float) -> None:
        """Close the channel once the prompts that the server computes have come, or after `grace`.

        The channel has to stay open until then: each segment is fetched by a call of its own.
        """
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            if grace:
                log.warning(
                    "prefill server %s is removed: its prompts did not come within %g s",
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
        """True while the server would take a prompt."""
        return self.state is State.READY and time.monotonic() >= self._rests_until

    # ---- as a Candidate

    @property
    def queue(self) -> int:
        # The report is up to half a second old, and what this server sent is only a part of the
        # load: the larger one is closer.
        return max(self._reported_tokens, self._sent_tokens)

    def cached(self, blocks: Blocks) -> int:
        return self._affinity.cached(blocks)

    # ---- prompts

    async def compute(
        self, prompt: PrefillPrompt, deadline: float
    ) -> AsyncGenerator[FetchedPages, None]:
        """Compute a prompt, see `Prefiller`."""
        with self._counted(len(prompt.token_ids) - prompt.start), self._resting_after_failure():
            async with aclosing(self._client.segments(prompt, deadline)) as segments:
                async for segment in segments:
                    yield FetchedPages(segment)
        self._affinity.add(blocks_of(prompt.token_ids, prompt.salt))

    @contextmanager
    def _resting_after_failure(self) -> Iterator[None]:
        """Give the server no prompts for a while if the block fails by its fault.

        Its queue is short as long as it fails, so it would otherwise be chosen for every prompt.
        """
        try:
            yield
        except TransferError as error:
            if error.code == "DATA_LOSS" or (error.remote and error.code in SERVER_FAILURES):
                self._rests_until = time.monotonic() + REST_SECONDS
            raise

    @contextmanager
    def _counted(self, tokens: int) -> Iterator[None]:
        self._sent_tokens += tokens
        self._idle.clear()
        try:
            yield
        finally:
            self._sent_tokens -= tokens
            if not self._sent_tokens:
                self._idle.set()

    @contextmanager
    def expiring(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Let `limit` expire at once if the server falls silent within the block."""
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
                refused = error.code in REFUSALS
                self._turn(State.REFUSING if refused else State.UNREACHABLE, str(error))
                # DEADLINE_EXCEEDED: no report came. A server that drains ends the call instead,
                # and finishes the prompts that it has.
                if error.code == "DEADLINE_EXCEEDED":
                    self._expire_all()
            except Exception:
                log.exception("prefill server %s: watching it failed", self.address)
                self._turn(State.UNREACHABLE, "watching it failed")
            await asyncio.sleep(RETRY_SECONDS)

    async def _listen(self) -> None:
        async with aclosing(self._client.loads()) as loads:
            async for tokens in loads:
                self._reported_tokens = tokens
                self._turn(State.READY, "")

    def _expire_all(self) -> None:
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0)

    def _turn(self, state: State, why: str) -> None:
        if state is not self._logged:
            level = logging.INFO if state is State.READY else logging.WARNING
            reason = f": {why}" if why else ""
            log.log(level, "prefill server %s is %s%s", self.address, state, reason)
            self._logged = state
        if state is State.READY and self.state is not State.READY:
            self._affinity = PrefixAffinity()  # the server may have restarted with an empty cache
        self.state = state


class PrefillPool:
    """Every prefill server of a decode server.

    `grace` is the time in seconds that prompts may still take when their server is removed.
    """

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
        """Have exactly these servers from now on; `connect` makes one of an address."""
        wanted = set(addresses)
        for address in wanted - self._servers.keys():
            self._servers[address] = server = connect(address)
            server.open()
        for address in self._servers.keys() - wanted:
            task = asyncio.create_task(self._servers.pop(address).close(self._grace))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        servers = list(self._servers.values())
        self._servers = {}
        for task in self._closing:
            task.cancel()
        await asyncio.gather(
            *self._closing, *(server.close(0) for server in servers), return_exceptions=True
        )
