"""Three arrangements of two cores: their loads, flags, figures and verdicts."""

import asyncio
import json
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from benchmarks.disaggregation.flags import parse_arguments
from benchmarks.disaggregation.handovers import Handovers, counts_in, handovers_between
from benchmarks.disaggregation.loads import loads_of, warm_up
from benchmarks.disaggregation.measuring import Bench, Result
from benchmarks.disaggregation.report import charts, show, write
from benchmarks.disaggregation.servers import (
    ARRANGEMENTS,
    Servers,
    connected_caller,
    server_flags,
)
from benchmarks.disaggregation.verdicts import verdicts
from jaxserve.client import AsyncClient
from jaxserve.server.disaggregation.flags import disaggregation
from jaxserve.server.disaggregation.metrics import DecodeMetrics
from jaxserve.server.disaggregation.policy import Decision
from jaxserve.server.flags import parse as parse_serve
from tests.jaxserve.server import harness

CONTEXT = 512


def arguments_with_trace(folder: Path, *flags: str) -> Namespace:
    """Return arguments with a trace of three prompts.

    The first two begin alike, and the last is longer than the context.
    """
    rows = (
        (1024, 8, [1, 2]),
        (2048, 800, [1, 3, 4, 5]),
        (5000, 80, [6, 7, 8, 9, 10, 11, 12, 13, 14, 15]),
    )
    lines = (
        dict(zip(("input_length", "output_length", "hash_ids"), row, strict=True)) for row in rows
    )
    trace = folder / "trace.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": 0, **line}) + "\n" for line in lines))
    return parse_arguments(["--trace", str(trace), "--seconds", "0.5", "--short", "8", *flags])


def test_loads(tmp_path: Path) -> None:
    none, some = loads_of(arguments_with_trace(tmp_path, "--rate", "0", "--rate", "20"), CONTEXT)
    assert (none.rate, none.long, some.rate) == (0.0, [], 20.0)
    assert none.short == some.short and [a.due for a in none.short] == [0.0, 0.125, 0.25, 0.375]
    assert all(32 <= a.prompt_tokens <= 96 and a.output_tokens == 64 for a in none.short)
    assert [(a.prompt_tokens, a.output_tokens) for a in some.long] == [
        (128, 1),
        (256, 64),
        (448, 10),
    ]
    assert all(a.due < 0.5 for a in some.long) and {a.block_tokens for a in some.long} == {64}
    assert [a.due for a in (*warm_up([none, some]).short, *warm_up([none, some]).long)] == 7 * [0.0]


def test_flags_that_servers_understand(tmp_path: Path) -> None:
    args = arguments_with_trace(tmp_path)
    plans = {}
    for name in ARRANGEMENTS:
        both = [parse_serve(flags) for flags in server_flags(name, args, CONTEXT, "127.0.0.1:9")]
        assert {a.engine.options.step_tokens for a in both} == {
            CONTEXT if name == "neither" else args.step_tokens
        }
        plans[name] = [disaggregation(a.roles, a.credentials) for a in both]
    assert plans["chunked"] == plans["neither"] == [None, None]
    prefill, decode = plans["disaggregated"]
    assert prefill and decode and prefill.prefills and decode.servers == ("127.0.0.1:9",)
    assert decode.policy.threshold == args.threshold


def test_requests_are_dealt_out(tmp_path: Path) -> None:
    """Two servers on the fake device are called in turn; every run has prompts of its own."""
    args = arguments_with_trace(tmp_path, "--rate", "20")
    (load,) = loads_of(args, CONTEXT)

    async def run() -> tuple[list[Result], list[int]]:
        folders = [tmp_path / name for name in "ab"]
        for folder in folders:
            folder.mkdir()
        async with harness.running(folders[0]) as a, harness.running(folders[1]) as b:
            async with (
                connected_caller([a.address, b.address]) as caller,
                AsyncClient(a.address) as client,
            ):
                bench = Bench(
                    "chunked",
                    Servers([a.address, b.address], None),
                    caller,
                    await client.model_info(),
                )
                results = [await bench.run(load) for _ in range(2)]
            return results, [len(server.runner.launches) for server in (a, b)]

    results, requests = asyncio.run(run())
    assert requests == [7, 7]
    for result in results:
        assert (result.short.ok, result.long.ok, result.all.ok, result.all.requests) == (4, 3, 7, 7)
        assert result.short.itl and result.gaps and result.gaps.p50 >= result.short.itl.p50 > 0
        assert (result.short.cached_prompt_tokens, result.handovers) == (0, None)
    write(tmp_path / "out.json", results, {"cores": 2})
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["cores"] == 2 and [r["arrangement"] for r in written["results"]] == [
        "chunked",
        "chunked",
    ]
    assert (tmp_path / "out.svg").read_text().count("<polyline") == 2 * 3


def test_what_a_decode_server_says_of_a_load() -> None:
    registry = CollectorRegistry()
    metrics = DecodeMetrics(registry)

    def now() -> Counter[tuple[str, ...]]:
        return counts_in(generate_latest(registry).decode())

    metrics.decided(Decision.REMOTE)
    metrics.ended(5.0, None)
    before = now()
    assert handovers_between(before, before) == Handovers({}, {}, 0.0, None)
    for decision in (Decision.REMOTE, Decision.REMOTE, Decision.SHORT):
        metrics.decided(decision)
    metrics.received(3 * 2**20)
    metrics.ended(0.25, None)
    metrics.ended(0.5, "unavailable")
    assert handovers_between(before, now()) == Handovers(
        {"remote": 2, "local_short": 1}, {"unavailable": 1}, 3.0, 0.25
    )


def test_it_is_said_when_it_does_not_pay(tmp_path: Path) -> None:
    async def run() -> Result:
        async with (
            harness.running(tmp_path) as server,
            connected_caller([server.address]) as caller,
        ):
            async with AsyncClient(server.address) as client:
                bench = Bench(
                    "chunked", Servers([server.address], None), caller, await client.model_info()
                )
            return await bench.run(
                loads_of(arguments_with_trace(tmp_path, "--rate", "0"), CONTEXT)[0]
            )

    chunked = asyncio.run(run())
    spread = chunked.short.itl
    assert spread
    apart = replace(
        chunked, arrangement="disaggregated", handovers=Handovers({"remote": 2}, {}, 1.0, None)
    )
    better = replace(
        apart, rate=1.0, short=replace(apart.short, itl=replace(spread, p99=spread.p99 / 2))
    )
    idle = replace(better, rate=2.0, handovers=Handovers({"local_short": 4}, {}, 0.0, None))
    slower = replace(
        better,
        rate=4.0,
        short=replace(apart.short, itl=replace(spread, p99=1e-3, p50=2 * spread.p50)),
    )
    beside = [replace(chunked, rate=rate) for rate in (0.0, 1.0, 2.0, 4.0)]
    lines = list(verdicts([apart, better, idle, slower, *beside]))
    assert [line.split(":")[:2] for line in lines] == [
        ["0 long prompts/s", " disaggregation does not pay"],
        ["1 long prompts/s", " disaggregation pays"],
        ["2 long prompts/s", " disaggregation has nothing to do"],
        ["4 long prompts/s", " disaggregation does not pay"],
    ]
    assert (
        "p99 ITL x 1.00" in lines[0]
        and "p99 ITL x 0.50" in lines[1]
        and "tokens/s x 1.00" in lines[1]
    )
    show([apart, chunked, better], Console(quiet=True))
    assert [len(line.points) for line in charts([apart, better])[2].lines] == [0, 0], (
        "without long prompts"
    )


def test_what_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("JAXSERVE_TEST_DATA", raising=False)
    for flags, words in (
        ([], "give --trace FILE, or JAXSERVE_TEST_DATA"),
        (
            ["--trace", str(tmp_path / "none")],
            f"--trace {tmp_path / 'none'}: there is no such file",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            parse_arguments(flags)
        assert ended.value.code == 2 and words in capsys.readouterr().err
