"""The benchmark of transfers still runs, and counts what was sent."""

import asyncio

from benchmarks.transfer import MEBI, measure, show


def test_a_round() -> None:
    result = asyncio.run(measure(MEBI, pieces=3, prompts=2, rounds=1))
    (found,) = result.rounds
    assert (result.mebibytes, result.prompts, list(found.ways)) == (1, 2, ["grpc", "jax"])
    assert min(found.copy, found.tcp) > 0
    assert all(min(way.speed, way.sender_cpu, way.receiver_cpu) > 0 for way in found.ways.values())
    assert result.share("jax", lambda r: r.ways["jax"].speed) == "100% (100%-100%)"
    show([result])
