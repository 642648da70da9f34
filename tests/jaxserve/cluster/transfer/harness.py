"""Both sides of a transfer in one process, with an engine that returns given segments."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from grpc import aio

from jaxserve.cluster.transfer.byte_budget import ByteBudget
from jaxserve.cluster.transfer.fetch import Metadata, SegmentReceiver, TransferServicer
from jaxserve.cluster.transfer.handshake import Handshake
from jaxserve.cluster.transfer.offers import OfferStore
from jaxserve.cluster.transfer.prefill import PrefillClient, PrefillPrompt, PrefillServicer
from jaxserve.cluster.transfer.ticket import TransferError
from jaxserve.cluster.v1 import prefill_pb2_grpc as rpc
from jaxserve.engine.kv_segment import KVSegment
from jaxserve.loading.digests import WeightDigests

MEBI = 2**20
SECONDS = 600.0  # that a transfer may take, unless a test is about that
MODEL = {"the model": "abc", "the device": "def"}
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")
# A connection of its own for every channel, found again soon.
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.enable_retries", 0),
)


def random_segment(
    tokens: int = 4,
    start: int = 0,
    *,
    group: int = 0,
    layers: int = 2,
    heads: int = 3,
    width: int = 6,
    dtype: str = "float32",
    latent: bool = False,
    seed: int = 0,
) -> KVSegment:
    """Return a segment of random bits, NaN and infinities among them."""
    rng = np.random.default_rng(seed)
    shape = (layers, tokens, heads, width)
    number = np.dtype(getattr(ml_dtypes, dtype, dtype))

    def bits(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return rng.integers(
            256, size=(*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8
        ).view(dtype)

    scaled = number.itemsize == 1
    single = np.dtype(np.float32)
    return KVSegment(
        group,
        start,
        k=bits(shape, number),
        v=None if latent else bits(shape, number),
        k_scale=bits(shape[:-1], single) if scaled else None,
        v_scale=bits(shape[:-1], single) if scaled and not latent else None,
    )


def large_segment(nbytes: int, start: int = 0) -> KVSegment:
    """Return a segment of this size: one layer of one token."""
    return KVSegment(0, start, k=np.full((1, 1, 1, nbytes // 4), start, np.float32), v=None)


def equal_segments(a: KVSegment, b: KVSegment) -> bool:
    """Return whether two segments are equal bit for bit."""
    arrays = a.arrays.keys() == b.arrays.keys() and all(
        (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
        for x, y in zip(a.arrays.values(), b.arrays.values(), strict=True)
    )
    return arrays and (a.group, a.start, a.stop) == (b.group, b.start, b.stop)


PIECES = [
    random_segment(
        64 * (i + 1), 64 * i * (i + 1) // 2, group=i % 2, dtype=dtype, latent=i % 3 == 2, seed=i
    )
    for i, dtype in enumerate(DTYPES * 2)
]


def now() -> float:
    """Return the time by the event loop's clock, in seconds."""
    return asyncio.get_running_loop().time()


@dataclass
class TurnedClock:
    """The clock of an event loop that a test has turned on by some seconds."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.seconds


def pass_time(seconds: float) -> None:
    """Let time pass for what waits on the event loop; deadlines of gRPC are of another clock."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop.time, TurnedClock):
        loop.time = TurnedClock()  # type: ignore[method-assign]
    loop.time.seconds += seconds  # type: ignore[attr-defined]


async def do_nothing(number: int) -> None: ...


def prompt_of(token_ids: tuple[int, ...]) -> PrefillPrompt:
    return PrefillPrompt(token_ids=token_ids, page_size=4)


@dataclass
class FakeSource:
    """A source that yields given segments.

    `before` is awaited before each one with its number; `open` counts prompts at work.
    """

    given: Sequence[KVSegment] = ()
    handshake: Handshake = field(default_factory=lambda: HANDSHAKE)
    waiting_tokens: int = 0
    before: Callable[[int], Awaitable[None]] = do_nothing
    open: int = 0
    prompts: list[PrefillPrompt] = field(default_factory=list)

    async def segments(
        self, prompt: PrefillPrompt, seconds: float | None
    ) -> AsyncGenerator[KVSegment, None]:
        self.open += 1
        self.prompts.append(prompt)
        try:
            for number, piece in enumerate(self.given):
                await self.before(number)
                yield piece
        finally:
            self.open -= 1


@dataclass
class Servers:
    """A server that computes, one that asks it, and the channel between them."""

    source: FakeSource
    offers: OfferStore
    servicer: PrefillServicer
    server: aio.Server
    port: int
    channel: aio.Channel
    budget: ByteBudget
    client: PrefillClient

    def client_over(self, channel: aio.Channel, metadata: Metadata = ()) -> PrefillClient:
        """Return a client like `client` over another channel."""
        return client_of(channel, self.budget, metadata)

    async def fetch_all(
        self, seconds: float = SECONDS, prompt: PrefillPrompt | None = None
    ) -> list[KVSegment]:
        return await fetch_all(self.client, seconds, prompt)

    async def wait_until_idle(self) -> None:
        """Wait until nothing is held or computed any more, a minute at most."""
        until = time.monotonic() + 60
        while self.offers.budget.held or self.budget.held or self.source.open:
            held = (self.offers.budget.held, self.budget.held, self.source.open)
            assert time.monotonic() < until, held
            await asyncio.sleep(0.002)
        self.offers.check_invariants()
        assert not (
            self.offers._offers
            or self.offers._taken
            or self.offers.budget.waiting
            or self.budget.waiting
        )


async def fetch_all(
    client: PrefillClient, seconds: float = SECONDS, prompt: PrefillPrompt | None = None
) -> list[KVSegment]:
    async with aclosing(client.segments(prompt or prompt_of((1, 2, 3)), now() + seconds)) as pieces:
        return [piece async for piece in pieces]


def weights(**changed: int) -> WeightDigests:
    """Return digests of three tensors, of which some have another number."""
    digests = WeightDigests()
    for name, part in ({"first": 1, "second": 2, "third": 3} | changed).items():
        digests.add(name, {0}, part)
    return digests


HANDSHAKE = Handshake(MODEL, weights(), "float32", ("float32",))


def client_of(channel: aio.Channel, budget: ByteBudget, metadata: Metadata = ()) -> PrefillClient:
    return PrefillClient(channel, SegmentReceiver(channel, budget, metadata), HANDSHAKE, metadata)


@asynccontextmanager
async def servers(
    *given: KVSegment,
    buffer: int = 64 * MEBI,
    room: int = 64 * MEBI,
    handshake: Handshake = HANDSHAKE,
) -> AsyncIterator[Servers]:
    """Yield a server that computes prompts, one that asks it, and the channel between them.

    buffer, room: bytes that the sender and the receiver may hold. handshake: the sender's.
    """
    source = FakeSource(given, handshake)
    offers = OfferStore(buffer)
    budget = ByteBudget(room)
    server = aio.server(options=[("grpc.so_reuseport", 0)])
    servicer = PrefillServicer(source, offers, SECONDS)
    rpc.add_PrefillServiceServicer_to_server(servicer, server)
    TransferServicer(offers).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}", OPTIONS) as channel:
            client = client_of(channel, budget)
            yield Servers(source, offers, servicer, server, port, channel, budget, client)
    finally:
        await server.stop(0)


async def refusal(work: Awaitable[Any]) -> TransferError:
    """Return the TransferError that a coroutine fails with."""
    try:
        await work
    except TransferError as error:
        return error
    raise AssertionError("nothing was refused")


@dataclass
class Proxy:
    """A network between a server and its clients, byte by byte; `port` is its entrance."""

    target: int
    port: int = 0
    frozen: asyncio.Event = field(default_factory=asyncio.Event)
    received_bytes: int = 0  # bytes from the server
    limits: Callable[[], float] = lambda: float(
        "inf"
    )  # bytes of a connection, from the server, after which it is cut
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", self.target)
        self._writers |= {writer, forth}
        for way in (
            self._pump(reader, forth, float("inf")),
            self._pump(back, writer, self.limits(), True),
        ):
            task = asyncio.create_task(way)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limit: float,
        counted: bool = False,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                if self.frozen.is_set():
                    await asyncio.Event().wait()
                limit -= len(data)
                self.received_bytes += len(data) * counted
                if limit < 0:
                    break
                writer.write(data)
                await writer.drain()
        writer.transport.abort()

    def cut(self) -> None:
        """Cut every connection at once."""
        for writer in self._writers:
            writer.transport.abort()

    @staticmethod
    @asynccontextmanager
    async def before(port: int) -> AsyncIterator["Proxy"]:
        proxy = Proxy(port)
        listening = await asyncio.start_server(proxy._connect, "127.0.0.1", 0)
        proxy.port = listening.sockets[0].getsockname()[1]
        try:
            yield proxy
        finally:
            listening.close()
            proxy.cut()
            for task in list(proxy._tasks):
                task.cancel()
            await asyncio.gather(*proxy._tasks, return_exceptions=True)
