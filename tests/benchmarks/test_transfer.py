"""The benchmark of transfers still runs, and counts what was sent."""

import asyncio

from benchmarks.transfer import MEBI, measure, show


def test_a_round() -> None:
    result = asyncio.run(measure(MEBI, pieces=3, prompts=2, rounds=1))
    (found,) = result.rounds
    assert (result.mebibytes, result.prompts) == (1, 2)
    assert min(found.copy, found.tcp) > 0
    assert min(found.grpc.speed, found.grpc.sender_cpu, found.grpc.receiver_cpu) > 0
    assert result.share(lambda r: r.grpc.speed) == "100% (100%-100%)"
    show([result])
