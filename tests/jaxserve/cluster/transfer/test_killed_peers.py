"""Processes that are killed or stopped before, within or after a transfer."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import pytest
from grpc import aio

from jaxserve.cluster.transfer.byte_budget import ByteBudget
from tests.jaxserve.cluster.transfer.harness import (
    MEBI,
    OPTIONS,
    client_of,
    fetch_all,
    large_segment,
    now,
    prompt_of,
    refusal,
    servers,
)

ROOT = Path(__file__).parents[4]
Process = subprocess.Popen[str]


@contextmanager
def peer_process(*arguments: str) -> Iterator[Process]:
    command = [sys.executable, "-m", "tests.jaxserve.cluster.transfer.peer", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_line(process: Process) -> str:
    assert process.stdout
    return process.stdout.readline()


@pytest.mark.parametrize(
    "number, code", [(signal.SIGKILL, "UNAVAILABLE"), (signal.SIGSTOP, "DEADLINE_EXCEEDED")]
)
@pytest.mark.parametrize("stage", ["before", "between two pieces", "in the midst of one", "after"])
def test_a_sender(stage: str, number: signal.Signals, code: str) -> None:
    async def main(sender: Process) -> None:
        budget = ByteBudget(200 * MEBI)
        async with aio.insecure_channel(
            f"127.0.0.1:{read_line(sender).strip()}", OPTIONS
        ) as channel:
            client = client_of(channel, budget)
            if stage == "after":
                assert len(await fetch_all(client)) == 3
            if stage in ("before", "after"):
                sender.send_signal(number)
            deadline = now() + 1.5
            async with aclosing(client.segments(prompt_of((1,)), deadline)) as pieces:
                if stage not in ("before", "after"):
                    await anext(pieces)
                if stage == "between two pieces":
                    sender.send_signal(number)
                    await asyncio.sleep(0.1)
                work = asyncio.create_task(anext(pieces))
                if stage == "in the midst of one":
                    while not budget.held:  # granted as the fetch begins
                        await asyncio.sleep(0)
                    await asyncio.sleep(0.005)
                    sender.send_signal(number)
                error = await refusal(_read_all(work, pieces))
            assert error.code == code and now() < deadline + 1
            assert not budget.held
            sender.kill()

    with peer_process("sender") as sender:
        asyncio.run(main(sender))


async def _read_all(first: "asyncio.Task[object]", rest: object) -> None:
    await first
    async for _ in rest:  # type: ignore[attr-defined]
        pass


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver(number: signal.Signals) -> None:
    """A killed receiver is noticed at once, a stopped one at the deadline of its next segment.

    The receiver holds the first of three segments.
    """

    async def main() -> None:
        pieces = [large_segment(40 * MEBI)] * 3
        async with servers(*pieces, buffer=200 * MEBI, seconds=2.0) as s:
            with peer_process("receiver", str(s.port)) as receiver:
                assert await asyncio.to_thread(read_line, receiver) == "piece\n"
                began = time.monotonic()
                receiver.send_signal(number)
                await s.wait_until_idle()
                took = time.monotonic() - began
                counts = s.offers.counts
                assert counts.fetched == 1
                if number == signal.SIGKILL:
                    assert took < 1 and counts.withdrawn == 2
                else:
                    assert (
                        took < 3 and counts.expired >= 1 and counts.expired + counts.withdrawn == 2
                    )
            assert len(await s.fetch_all()) == 3

    asyncio.run(main())
