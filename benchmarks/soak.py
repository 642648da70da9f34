"""Growth of a server's memory, descriptors and threads under mixed traffic.

Question: does a server that is left running stay as it was?

    python -m benchmarks.soak [--minutes 10] [--clients 12] [--model DIR] [--out FILE]

Starts `jaxserve serve` and talks to it from many coroutines: whole answers, streams, four
choices at once, conversations, streams left early, deadlines that pass, invalid requests, all at
random. Every second the server's memory, descriptors and threads are read from /proc, and its loads
asked for. A line is fitted to the second half of each: in the first, the allocators below Python
and gRPC reach their height. In the end, with nobody calling, nothing may be in use. Exit code 1
when something grew.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.device import about
from jaxserve.cli.flags import BUNDLED
from jaxserve.client import AsyncClient
from jaxserve.errors import JaxserveError

DRAFT = BUNDLED.with_name("tiny-chat-draft")
BOUNDS = {
    "rss_kib": 512.0,
    "descriptors": 0.5,
    "threads": 0.2,
}  # growth per minute that is no leak: noise of a fit
TEXTS = (
    "Once upon a time",
    "What is 7 plus 5?",
    "The fox",
    "A very long story about a green frog. " * 10,
)


@dataclass
class Samples:
    seconds: list[float] = field(default_factory=list)
    rss_kib: list[float] = field(default_factory=list)
    descriptors: list[float] = field(default_factory=list)
    threads: list[float] = field(default_factory=list)
    requests: int = 0
    refused: int = 0

    def take(self, pid: int, began: float) -> None:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        self.seconds.append(time.monotonic() - began)
        self.rss_kib.append(float(status["VmRSS"].split()[0]))
        self.threads.append(float(status["Threads"]))
        self.descriptors.append(float(len(os.listdir(f"/proc/{pid}/fd"))))

    def slopes(self) -> dict[str, float]:
        """Return each figure's growth per minute, by least squares, in the second half."""
        first = len(self.seconds) // 2
        minutes = np.array(self.seconds[first:]) / 60
        return {
            name: float(np.polyfit(minutes, getattr(self, name)[first:], 1)[0]) for name in BOUNDS
        }


async def whole(client: AsyncClient, dice: random.Random) -> None:
    await client.generate(
        dice.choice(TEXTS), max_tokens=dice.randint(1, 40), logprobs=dice.choice([None, 3])
    )


async def stream(client: AsyncClient, dice: random.Random) -> None:
    async with client.stream(dice.choice(TEXTS), max_tokens=60) as events:
        async for _ in events:
            pass


async def left_early(client: AsyncClient, dice: random.Random) -> None:
    leave = dice.randint(1, 20)
    async with client.stream(dice.choice(TEXTS), max_tokens=200, ignore_eos=True) as events:
        async for _ in events:
            leave -= 1
            if not leave:
                return


async def four(client: AsyncClient, dice: random.Random) -> None:
    await client.generate(dice.choice(TEXTS), max_tokens=20, n=4, stop=["the"])


async def chat(client: AsyncClient, dice: random.Random) -> None:
    await client.chat([{"role": "user", "content": dice.choice(TEXTS)}], max_tokens=20)


async def too_late(client: AsyncClient, dice: random.Random) -> None:
    await client.generate(
        dice.choice(TEXTS), max_tokens=300, ignore_eos=True, timeout=dice.uniform(0.01, 0.2)
    )


async def invalid(client: AsyncClient, dice: random.Random) -> None:
    await client.generate("x" * 20_000, max_tokens=dice.randint(1, 4))


KINDS = (whole, stream, left_early, four, chat, too_late, invalid)


async def one_client(client: AsyncClient, seed: int, until: float, samples: Samples) -> None:
    dice = random.Random(seed)
    while time.monotonic() < until:
        samples.requests += 1
        try:
            await dice.choice(KINDS)(client, dice)
        except JaxserveError:
            samples.refused += 1


async def soak(
    address: str, pid: int, minutes: float, clients: int
) -> tuple[Samples, dict[str, int]]:
    samples = Samples()
    async with AsyncClient(address, retries=0) as client:
        await client.wait_ready(timeout=600)
        began = time.monotonic()
        until = began + 60 * minutes
        tasks = [
            asyncio.create_task(one_client(client, seed, until, samples)) for seed in range(clients)
        ]
        for _ in track(
            range(int(60 * minutes)), description="soaking", console=Console(stderr=True)
        ):
            await asyncio.sleep(1)
            samples.take(pid, began)
        await asyncio.gather(*tasks)
        await asyncio.sleep(2)
        loads = await client.loads()
        info = await client.server_info()
    left = {
        "requests": loads.requests,
        "running": loads.running,
        "waiting": loads.waiting,
        "pages": loads.pages_used,
    }
    return samples, left | {"compiles_after_ready": info.compiles_after_ready}


@contextlib.contextmanager
def server(model: Path) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [
        "--model",
        str(model),
        "--port",
        str(port),
        "--no-http",
        "--max-context",
        "512",
        "--log-level",
        "error",
    ]
    process = subprocess.Popen([sys.executable, "-m", "jaxserve.serve", *flags])
    try:
        yield f"127.0.0.1:{port}", process
    finally:
        process.terminate()
        process.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--model", type=Path, default=DRAFT)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with server(args.model) as (address, process):
        samples, left = asyncio.run(soak(address, process.pid, args.minutes, args.clients))
    slopes = samples.slopes()
    title = f"{samples.requests} requests, {samples.refused} of them failed on purpose"
    table = Table("", "least", "most", "growth per minute", title=title)
    for name, slope in slopes.items():
        values = getattr(samples, name)
        table.add_row(name, f"{min(values):,.0f}", f"{max(values):,.0f}", f"{slope:+.2f}")
    Console().print(table, left)
    if args.out:
        args.out.write_text(
            json.dumps(about() | {"left": left, "slopes": slopes} | asdict(samples)) + "\n"
        )
    grew = [name for name, slope in slopes.items() if slope > BOUNDS[name]]
    return int(bool(grew) or any(left.values()) or process.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
