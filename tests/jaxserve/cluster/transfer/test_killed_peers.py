"""Processes that are killed or stopped before, within or after a transfer."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import pytest
from grpc import aio

from jaxserve.cluster.transfer.byte_budget import ByteBudget
from tests.jaxserve.cluster.transfer.harness import (
    MEBI,
    OPTIONS,
    SECONDS,
    client_of,
    fetch_all,
    large_segment,
    now,
    pass_time,
    prompt_of,
    refusal,
    servers,
)

pytestmark = pytest.mark.system
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


KILLED = (signal.SIGKILL, "UNAVAILABLE")
STOPPED = (signal.SIGSTOP, "DEADLINE_EXCEEDED")


@pytest.mark.parametrize(
    ("stage", "number", "code"),
    [
        ("before", *KILLED),
        ("between two pieces", *STOPPED),
        ("in the midst of one", *KILLED),
        ("after", *STOPPED),
        pytest.param("before", *STOPPED, marks=pytest.mark.slow),
        pytest.param("between two pieces", *KILLED, marks=pytest.mark.slow),
        pytest.param("in the midst of one", *STOPPED, marks=pytest.mark.slow),
        pytest.param("after", *KILLED, marks=pytest.mark.slow),
    ],
)
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
            # A killed sender is noticed long before the deadline, a stopped one by it: on a machine
            # that stalls, perhaps before it was stopped.
            deadline = now() + (SECONDS if number == signal.SIGKILL else 1.5)

            async def read_all() -> None:
                async with aclosing(client.segments(prompt_of((1,)), deadline)) as pieces:
                    if stage not in ("before", "after"):
                        await anext(pieces)
                    if stage == "between two pieces":
                        sender.send_signal(number)
                        await asyncio.sleep(0.1)
                    work = asyncio.create_task(anext(pieces))
                    if stage == "in the midst of one":
                        while not (budget.held or work.done()):  # granted as the fetch begins
                            await asyncio.sleep(0)
                        await asyncio.sleep(0.005)
                        sender.send_signal(number)
                    await work
                    async for _ in pieces:
                        pass

            assert (await refusal(read_all())).code == code
            assert not budget.held
            sender.kill()

    with peer_process("sender") as sender:
        asyncio.run(main(sender))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver(number: signal.Signals) -> None:
    """A killed receiver is noticed at once, a stopped one at the deadline of its next segment.

    The receiver holds the first of three segments.
    """

    async def main() -> None:
        pieces = [large_segment(40 * MEBI)] * 3
        async with servers(*pieces, buffer=200 * MEBI) as s:
            with peer_process("receiver", str(s.port)) as receiver:
                assert await asyncio.to_thread(read_line, receiver) == "piece\n"
                receiver.send_signal(number)
                if number == signal.SIGSTOP:
                    pass_time(SECONDS)
                await s.wait_until_idle()
                counts = s.offers.counts
                assert counts.fetched == 1 and counts.expired + counts.withdrawn == 2
                assert (counts.expired > 0) == (number == signal.SIGSTOP)
            assert len(await s.fetch_all()) == 3

    asyncio.run(main())
