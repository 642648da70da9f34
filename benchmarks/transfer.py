"""Speed of keys and values from another server, beside a copy in memory and loopback TCP.

    python -m benchmarks.transfer [--mebibytes 16 --mebibytes 256] [--pieces 8] [--prompts 1
    --prompts 4] [--rounds 5]
                                  [--out FILE]

The sender is a process of its own; it has one piece, which it offers as often as it is asked for.
Both run on uvloop, as servers do. A round measures, one after the other: copying as many bytes from
one array to another; reading them from a socket, in blocking calls; and whole prompts over gRPC, as
many at a time as asked for, each of them so many pieces. Reported are medians over the rounds:
GB/s, gRPC's share of the others in the same round with the least and the largest, CPU seconds per
GB of both processes, and how late the receiver's event loop woke up at worst, which is what other
streams feel of it.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import uvloop
from grpc import aio  # type: ignore[attr-defined]
from rich.console import Console
from rich.table import Table

from benchmarks.device import versions
from jaxserve.cluster.transfer.byte_budget import ByteBudget
from jaxserve.cluster.transfer.fetch import SegmentReceiver, TransferServicer
from jaxserve.cluster.transfer.handshake import Handshake
from jaxserve.cluster.transfer.offers import OfferStore
from jaxserve.cluster.transfer.prefill import PrefillClient, PrefillPrompt, PrefillServicer
from jaxserve.cluster.v1 import prefill_pb2_grpc as rpc
from jaxserve.engine.kv_segment import KVSegment
from jaxserve.loading.digests import WeightDigests

MEBI = 2**20
SECONDS = 300.0  # of any call
HANDSHAKE = Handshake({}, WeightDigests(), "bfloat16", ("bfloat16",))
HOST = "127.0.0.1"
HEADS, WIDTH, LAYERS = 8, 128, 32  # Llama-3-8B: 128 KiB a token in bfloat16


# ---- the sender's process


def piece_of(nbytes: int) -> KVSegment:
    shape = (LAYERS, nbytes // (4 * LAYERS * HEADS * WIDTH), HEADS, WIDTH)
    k, v = (
        np.random.default_rng(i).integers(2**15, size=shape, dtype=np.uint16).view("bfloat16")
        for i in (0, 1)
    )
    return KVSegment(0, 0, k, v)


class OnePiece:
    """A source whose prompts say how many pieces they want."""

    waiting_tokens = 0
    handshake = HANDSHAKE

    def __init__(self, piece: KVSegment):
        self._piece = piece

    async def segments(
        self, prompt: PrefillPrompt, seconds: float | None
    ) -> AsyncGenerator[KVSegment, None]:
        for _ in range(prompt.token_ids[0]):
            yield self._piece


def serve_tcp(listening: socket.socket, data: memoryview) -> None:
    """Send the data to one connection, as often as it sends a byte."""
    connection, _ = listening.accept()
    while connection.recv(1):
        connection.sendall(data)


async def serve(nbytes: int) -> None:
    """Run the sender: print its ports, then its CPU seconds so far for every line that it reads."""
    piece = piece_of(nbytes)
    offers = OfferStore(4 * nbytes)
    server = aio.server()
    prefill = PrefillServicer(OnePiece(piece), offers, SECONDS)
    rpc.add_PrefillServiceServicer_to_server(prefill, server)
    TransferServicer(offers).add_to(server)
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    listening = socket.create_server((HOST, 0))
    data = memoryview(piece.k.reshape(-1).view(np.uint8))
    threading.Thread(target=serve_tcp, args=(listening, data), daemon=True).start()
    print(json.dumps({"grpc": port, "tcp": listening.getsockname()[1]}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(time.process_time(), flush=True)
    await server.stop(0)


class Sender:
    """The sending process, seen from here."""

    def __init__(self, nbytes: int):
        command = [
            sys.executable,
            "-m",
            "benchmarks.transfer",
            "--serve",
            "--mebibytes",
            str(nbytes // MEBI),
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ports: dict[str, int] = json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def cpu_seconds(self) -> float:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self._line())

    def __enter__(self) -> "Sender":
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # which closes its input, and waits
            pass


# ---- the receiver's process


@dataclass(frozen=True)
class Figures:
    """GB/s, CPU seconds per GB, and milliseconds that the loop was late."""

    speed: float
    sender_cpu: float
    receiver_cpu: float
    late: float


@dataclass(frozen=True)
class Round:
    """Figures of a round; copy, tcp: GB/s."""

    copy: float
    tcp: float
    grpc: Figures


@dataclass(frozen=True)
class Result:
    mebibytes: int
    prompts: int
    rounds: list[Round]

    def median(self, of: Callable[[Round], float]) -> float:
        return statistics.median(map(of, self.rounds))

    def share(self, of: Callable[[Round], float]) -> str:
        """Return gRPC's share of another speed: the median, the least and the largest."""
        shares = sorted(r.grpc.speed / of(r) for r in self.rounds)
        return f"{statistics.median(shares):.0%} ({shares[0]:.0%}-{shares[-1]:.0%})"


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def receive_tcp(connection: socket.socket, into: memoryview, times: int) -> None:
    for _ in range(times):
        connection.send(b"x")
        got = 0
        while got < len(into):
            got += connection.recv_into(into[got:])


async def lateness(done: asyncio.Event) -> float:
    """Milliseconds, at worst, that this coroutine ran later than it had asked for."""
    worst = 0.0
    loop = asyncio.get_running_loop()
    while not done.is_set():
        due = loop.time() + 0.001
        await asyncio.sleep(0.001)
        worst = max(worst, loop.time() - due)
    return 1000 * worst


async def receive(client: PrefillClient, pieces: int) -> None:
    deadline = asyncio.get_running_loop().time() + SECONDS
    came = 0
    async with aclosing(
        client.segments(PrefillPrompt(token_ids=(pieces,), page_size=64), deadline)
    ) as found:
        async for _ in found:
            came += 1
    assert came == pieces


async def measure(nbytes: int, pieces: int, prompts: int, rounds: int) -> Result:
    async with AsyncExitStack() as stack:
        sender = stack.enter_context(Sender(nbytes))
        connection = stack.enter_context(socket.create_connection((HOST, sender.ports["tcp"])))
        address = f"{HOST}:{sender.ports['grpc']}"
        channel = await stack.enter_async_context(aio.insecure_channel(address))
        receiver = SegmentReceiver(channel, ByteBudget(4 * nbytes))
        client = PrefillClient(channel, receiver, HANDSHAKE)
        await receive(client, 1)
        bench = Bench(sender, connection, client, nbytes, pieces, prompts)
        return Result(nbytes // MEBI, prompts, [await bench.round() for _ in range(rounds)])


@dataclass(frozen=True)
class Bench:
    sender: Sender
    connection: socket.socket
    client: PrefillClient
    nbytes: int
    pieces: int
    prompts: int

    async def round(self) -> Round:
        source = np.ones(self.nbytes // 2, np.uint8)
        target = np.zeros(self.nbytes // 2, np.uint8)
        times = 2 * self.pieces * self.prompts
        copy = seconds(lambda: [np.copyto(target, source) for _ in range(times)])
        tcp = seconds(lambda: receive_tcp(self.connection, memoryview(target), times))
        size = self.nbytes * self.pieces * self.prompts / 1e9
        return Round(size / copy, size / tcp, await self._measure(size))

    async def _measure(self, size: float) -> Figures:
        """Whole prompts over gRPC. size: GB."""
        done = asyncio.Event()
        there = self.sender.cpu_seconds()
        here = time.process_time()
        late = asyncio.create_task(lateness(done))
        began = time.perf_counter()
        await asyncio.gather(*(receive(self.client, self.pieces) for _ in range(self.prompts)))
        took = time.perf_counter() - began
        done.set()
        here = time.process_time() - here
        there = self.sender.cpu_seconds() - there
        return Figures(size / took, there / size, here / size, await late)


def cells(result: Result) -> list[str]:
    return [
        f"{result.median(lambda r: r.copy):.2f}",
        f"{result.median(lambda r: r.tcp):.2f}",
        f"{result.median(lambda r: r.grpc.speed):.2f}",
        result.share(lambda r: r.copy),
        result.share(lambda r: r.tcp),
        f"{result.median(lambda r: r.grpc.sender_cpu):.2f}",
        f"{result.median(lambda r: r.grpc.receiver_cpu):.2f}",
        f"{result.median(lambda r: r.grpc.late):.1f}",
    ]


def show(results: list[Result]) -> None:
    speeds = ("copy", "TCP", "gRPC", "of copy", "of TCP")
    columns = ("MiB", "prompts", *speeds, "CPU s/GB there", "here", "late, ms")
    table = Table(*columns, title="GB/s of pieces between two processes")
    for result in results:
        table.add_row(str(result.mebibytes), str(result.prompts), *cells(result))
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--mebibytes", action="append", type=int, help="of a piece; default: 16 and 256"
    )
    parser.add_argument("--pieces", type=int, default=8, help="of a prompt")
    parser.add_argument("--prompts", action="append", type=int, help="at a time; default: 1 and 4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return uvloop.run(serve(args.mebibytes[0] * MEBI))
    results = [
        uvloop.run(measure(mebibytes * MEBI, args.pieces, prompts, args.rounds))
        for mebibytes in args.mebibytes or (16, 256)
        for prompts in args.prompts or (1, 4)
    ]
    show(results)
    if args.out:
        args.out.write_text(
            json.dumps(versions() | {"results": [asdict(r) for r in results]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
