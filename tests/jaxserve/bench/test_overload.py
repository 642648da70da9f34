"""bench overload: its figures by hand, and all of it against a server on the fake device."""

import asyncio
import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from jaxserve.bench.arrivals import Arrival
from jaxserve.bench.flags import OverloadOptions, parse
from jaxserve.bench.latency import OK, Outcome
from jaxserve.bench.load import Load
from jaxserve.bench.overload import check, measure
from jaxserve.bench.overload_report import OverloadPoint, OverloadReport
from jaxserve.errors import ConfigError
from jaxserve.plan.plot import picture
from tests.jaxserve.bench.test_serve import ENVIRONMENT
from tests.jaxserve.server import harness
from tests.jaxserve.server.http import harness as http_harness


def options_of(flags: str) -> OverloadOptions:
    options = parse(["overload", *flags.split()])
    check(options)
    return options


def outcome(
    sent: float, ended: float, status: str = OK, tokens: int = 1, deadline: float = 2.0
) -> Outcome:
    made = Outcome(sent, 1, 1, deadline=deadline, sent=sent, ended=ended, status=status)
    if tokens:
        made.saw(ended, tokens)
    return made


def test_a_point_by_hand() -> None:
    outcomes = [
        outcome(100.0, 101.0),  # good, but in the lead-in
        outcome(100.5, 102.5),  # good, at the last moment
        outcome(101.0, 103.1),  # late
        outcome(102.0, 103.5),
        outcome(103.0, 103.001, "RESOURCE_EXHAUSTED", 0),
        outcome(103.0, 103.003, "RESOURCE_EXHAUSTED", 0),
        outcome(103.0, 104.0, "DEADLINE_EXCEEDED", 0),
        outcome(103.0, 105.0, "DEADLINE_EXCEEDED"),
        outcome(105.0, 106.5),  # good, but after the time that counts
    ]
    for each in outcomes:
        each.retry_after = 0.5 if each.status == "RESOURCE_EXHAUSTED" else None
    load = Load([Arrival(0.0, 1, 1)], rate=2.0)
    point = OverloadPoint.of(load, outcomes, lead_in=2.0, seconds=4.0)
    assert (point.sent, point.good, point.late) == (9, 4, 1)
    assert (point.refused, point.expired, point.cut) == (2, 1, 1)
    assert point.goodput == 2 / 4
    assert point.refusal and point.refusal.p50 == pytest.approx(2.0)
    assert {name: each.count for name, each in point.failures.items()} == {
        "RESOURCE_EXHAUSTED": 2,
        "DEADLINE_EXCEEDED": 2,
    }
    assert len(point.remarks) == 2


def test_a_generator_that_was_late_says_so() -> None:
    outcomes = [outcome(100.0, 101.0), outcome(100.1, 101.0)]
    outcomes[1].due = 99.0
    point = OverloadPoint.of(Load([], rate=2.0), outcomes, lead_in=0.0, seconds=4.0)
    assert "load generator was at its limit" in point.remarks[0]
    closed = OverloadPoint.of(Load([], concurrency=2), outcomes, lead_in=0.0, seconds=4.0)
    assert not closed.remarks


@pytest.mark.system
@pytest.mark.parametrize("protocol", ["grpc", "openai"])
def test_all_loads(tmp_path: Path, protocol: str) -> None:
    flags = (
        "--loads 0.5,4 --duration 0.5 --deadlines 0.5,1 --prompt-tokens 5 --output-tokens 8 "
        "--choices 2 --clients 2 --vocab-size 200"
    )
    report = OverloadReport(ENVIRONMENT, {})

    async def run() -> None:
        async with http_harness.serving(tmp_path, seconds=0.005, max_batch=4) as http:
            address = http.server.address
            target = f"grpc://{address}" if protocol == "grpc" else f"{http.base}/v1"
            options = options_of(f"{flags} --target {target}")
            await measure(options, report, Console(file=io.StringIO()))
            await http.server.at_rest()

    asyncio.run(run())
    names = [point.load for point in report.points]
    assert names[0] == names[-1] == "2 at a time" and len(names) == 4
    assert report.capacity > 0
    for point in report.points:
        failed = point.refused + point.expired + point.cut
        assert point.sent == point.good + point.late + failed
    half, four = report.points[1:3]
    assert half.offered_per_second == pytest.approx(report.capacity / 2, rel=1e-3)
    assert four.sent > half.sent
    assert (four.refusal is not None) == bool(four.refused)
    table = report.text("md")
    assert "| 2 at a time" in table and "100%" in table and "█" in table
    assert "<svg" in picture([report.chart()])
    written = json.loads(report.text("json"))
    assert written["benchmark"] == "overload" and written["capacity"] == report.capacity
    assert [row["load"] for row in written["results"]] == names
    assert [row["load"] for row in csv.DictReader(io.StringIO(report.text("csv")))] == names


def test_the_rows_of_the_server_are_the_clients(tmp_path: Path) -> None:
    """A deadline that nothing meets ends it, with a word on what to change."""
    report = OverloadReport(ENVIRONMENT, {})

    async def run() -> None:
        async with harness.running(tmp_path, seconds=0.05) as server:
            options = options_of(
                f"--target grpc://{server.address} --deadlines 0.01 --duration 0.1 "
                f"--prompt-tokens 5 --output-tokens 8"
            )
            with pytest.raises(ConfigError, match="no request met its deadline with 4 at a time"):
                await measure(options, report, Console(file=io.StringIO()))

    asyncio.run(run())


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--loads 0", "--loads"),
        ("--deadlines x", "--deadlines"),
        ("--choices 0", "--choices"),
        ("--duration -1", "--duration"),
        ("--trace x.jsonl", "--trace is of `bench serve`"),
        ("--token-scale 2", "--token-scale is of `bench serve`"),
        ("--max-output-tokens 2", "--max-output-tokens is of `bench serve`"),
        ("--output-tokens 0", "not a length"),
        ("--target http://x:1/v1 --model y", "--model"),
    ],
)
def test_wrong_flags(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options_of(flags)
