"""The load generator against servers on the fake device, and against none."""

import asyncio
import csv
import io
import json
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from jaxserve.bench import loops
from jaxserve.bench.__main__ import main
from jaxserve.bench.flags import parse
from jaxserve.bench.latency import Objective
from jaxserve.bench.load import check
from jaxserve.bench.own_server import free_ports
from jaxserve.bench.report import Report
from jaxserve.bench.serve import measure
from jaxserve.bench.target import Target, target
from jaxserve.client import CallError
from jaxserve.errors import ConfigError
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.limits import Limits
from jaxserve.server.security.auth import BearerTokens
from tests.jaxserve.client.test_connection import signed
from tests.jaxserve.letters import HOLE, LETTERS, with_letters
from tests.jaxserve.server import harness
from tests.jaxserve.server.http import harness as http_harness
from tests.jaxserve.server.security.test_tls import listening

STEP = 0.004  # seconds of the device
ENVIRONMENT = {
    "load_before": 0.0,
    "cores": 2,
    "jaxserve": "1",
    "jax": "2",
    "python": "3",
    "date": "2026-01-01",
}


async def measured(
    flags: Sequence[str], report: Report, words: io.StringIO | None = None
) -> Report:
    """Measure as `main` does, but on this event loop; return even if cancelled.

    words: receives what goes to standard error.
    """
    options = parse(["serve", *flags])
    check(options)
    report.objective = Objective.parse(options.slo) if options.slo else Objective()
    with suppress(asyncio.CancelledError):
        await measure(options, report, Console(file=words or io.StringIO(), width=200))
    return report


def empty() -> Report:
    return Report(ENVIRONMENT, Objective())


def test_rates_over_grpc(tmp_path: Path) -> None:
    flags = (
        "--rate 100,200 --requests 12 --prompt-tokens 5-40 --output-tokens 6 --slo ttft=600000"
    ).split()

    async def run() -> Report:
        async with harness.running(tmp_path, seconds=STEP) as server:
            report = await measured(
                [*flags, "--target", f"grpc://{server.address}", "--repetitions", "2"], empty()
            )
            await server.at_rest()
            return report

    report = asyncio.run(run())
    assert [(point.load, point.repetition) for point in report.points] == [
        (load, repetition) for repetition in range(2) for load in ("100/s", "200/s")
    ]
    for point in report.points:
        s = point.summary
        assert (s.requests, s.ok, s.unfinished, s.failures, point.interrupted) == (
            12,
            12,
            0,
            {},
            False,
        )
        assert s.ttft and s.tpot and s.itl and s.e2e
        assert s.ttft.p50 >= 1e3 * STEP and s.tpot.p50 >= 0.9e3 * STEP and s.e2e.p50 >= 6e3 * STEP
        assert s.output_tokens_per_second == pytest.approx(12 * 6 / s.busy_seconds, rel=0.05)
        assert (s.cached_prompt_tokens, s.goodput_share, s.shared_out) == (0, 1.0, 0)
    slow, fast = (point.offered_per_second or 0 for point in report.points[:2])
    assert slow == pytest.approx(fast / 2, rel=1e-3)
    written = json.loads(report.text("json"))
    assert [point["summary"]["ok"] for point in written["results"]] == [12] * 4
    assert written["environment"]["device"] == written["server"]["about"]["device_kind"] == "fake"
    rates, latencies = report.text("md").split("\n\n")[:2]
    assert [line.split()[1:6] for line in rates.splitlines()[2:]] == [
        [load, "|", "24", "|", "24"] for load in ("100/s", "200/s")
    ]
    assert latencies.count("| TTFT |") == 2 and "±" in latencies
    lines = list(csv.DictReader(io.StringIO(report.text("csv"))))
    assert [(line["load"], line["ok"]) for line in lines] == [
        (point.load, "12") for point in report.points
    ]
    assert float(lines[0]["ttft_p90"]) == written["results"][0]["summary"]["ttft"]["p90"]


@pytest.mark.parametrize("protocol", ["grpc", "openai"])
def test_a_closed_loop_keeps_so_many_running(tmp_path: Path, protocol: str) -> None:
    flags = (
        "--concurrency 1,3 --requests 9 --prompt-tokens 5 --output-tokens 4 --warm-up 0 "
        "--vocab-size 200"
    ).split()

    async def run() -> Report:
        async with http_harness.serving(tmp_path, seconds=STEP) as http:
            return await measured([*flags, "--target", address(http, protocol)], empty())

    points = asyncio.run(run()).points
    assert [point.load for point in points] == ["1 at a time", "3 at a time"]
    assert [(p.concurrency, p.peak_in_flight, p.summary.ok, p.warning) for p in points] == [
        (1, 1, 9, ""),
        (3, 3, 9, ""),
    ]
    assert all(point.offered_per_second is None and not point.interrupted for point in points)


def test_a_closed_loop_of_some_seconds_sends_nothing_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least two rounds, then what runs is waited for; the same lengths again and again, with
    other prompts. The clock is that of the device.
    """

    async def run() -> Report:
        async with harness.running(tmp_path) as server:
            clock = SimpleNamespace(monotonic=lambda: server.runner.steps * STEP)
            monkeypatch.setattr(loops, "time", clock)
            flags = "--concurrency 2 --duration 0.5 --prompt-tokens 20 --output-tokens 3".split()
            return await measured([*flags, "--target", f"grpc://{server.address}"], empty())

    (point,) = asyncio.run(run()).points
    s = point.summary
    assert s.ok == s.requests > 4 and not point.interrupted and s.cached_prompt_tokens == 0


def test_runs_find_nothing_of_each_other_cached(tmp_path: Path) -> None:
    """Nor of the warm-up, by a server that knows no salt."""

    async def run() -> Report:
        async with http_harness.serving(tmp_path) as http:
            flags = (
                "--rate inf,1000 --requests 5 --prompt-tokens 20 --output-tokens 3 "
                "--repetitions 2 --strict"
            ).split()
            return await measured(
                [*flags, "--vocab-size", "200", "--target", address(http, "openai")], empty()
            )

    summaries = [point.summary for point in asyncio.run(run()).points]
    assert [(s.ok, s.prompt_tokens, s.cached_prompt_tokens) for s in summaries] == [(5, 100, 0)] * 4
    assert all(s.shared_out for s in summaries)


def test_texts_of_a_file(tmp_path: Path) -> None:
    """The server counts their tokens, and needs to tell nothing about its vocabulary."""
    (tmp_path / "prompts").write_text("fox\n\nThe quick brown fox\n")
    flags = [
        "--prompts-file",
        str(tmp_path / "prompts"),
        *"--rate inf --requests 4 --output-tokens 3".split(),
    ]

    async def run() -> list[Report]:
        async with http_harness.serving(tmp_path) as http:
            targets = [address(http, protocol) for protocol in ("grpc", "openai")]
            return [await measured([*flags, "--target", target], empty()) for target in targets]

    over_grpc, over_http = (report.points[0].summary for report in asyncio.run(run()))
    assert over_grpc.ok == over_http.ok == 4
    assert (
        over_grpc.prompt_tokens
        == over_http.prompt_tokens
        == 2 * (len("fox") + len("The quick brown fox")) + 4
    )  # and BOS


def address(http: http_harness.Http, protocol: str) -> str:
    return f"grpc://{http.server.address}" if protocol == "grpc" else f"{http.base}/v1"


@pytest.mark.system
@pytest.mark.parametrize("protocol", ["grpc", "openai"])
def test_a_trace_with_shared_blocks(tmp_path: Path, protocol: str) -> None:
    """Blocks of 16 tokens in pages of 4: the second request finds the 32 tokens that it shares with
    the first.
    """
    rows = [
        {"timestamp": 0, "input_length": 1200, "output_length": 96, "hash_ids": [0, 1, 2]},
        {"timestamp": 9000, "input_length": 1400, "output_length": 320, "hash_ids": [0, 1, 3]},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    flags = [
        "--trace",
        str(trace),
        "--time-scale",
        "0.05",
        "--token-scale",
        str(16 / 512),
        "--max-output-tokens",
        "8",
    ]

    async def run() -> Report:
        async with http_harness.serving(tmp_path) as http:
            service = http.server.service
            answer = service.answer

            async def in_turn(call: IncomingRequest) -> Answer:
                await harness.until(lambda: not service.in_flight)
                return await answer(call)

            service.answer = in_turn  # type: ignore[method-assign, assignment]
            return await measured(
                [*flags, "--vocab-size", "200", "--target", address(http, protocol)], empty()
            )

    (point,) = asyncio.run(run()).points
    s = point.summary
    assert (s.ok, point.capped, s.prompt_tokens, s.cached_prompt_tokens) == (
        2,
        1,
        32 + 6 + 32 + 12,
        32,
    )
    assert point.offered_per_second == pytest.approx(1 / 0.45, rel=1e-3)
    assert s.lag and s.busy_seconds > 0.44 - 2e-3 * s.lag.mean, "one was sent before its time"


@pytest.mark.system
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program")
@pytest.mark.parametrize("protocol", ["grpc", "openai"])
def test_a_server_with_certificates_and_a_token(tmp_path: Path, protocol: str) -> None:
    (cert, key), (own, own_key) = signed(tmp_path, "server"), signed(tmp_path, "client")
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "wrong").write_text("guess\n")
    tls = ["--tls-ca", str(cert), "--tls-cert", str(own), "--tls-key", str(own_key)]

    async def run() -> Report:
        async with (
            harness.running(tmp_path) as server,
            listening(server, "secret", tls_cert=cert, tls_key=key, tls_client_ca=own) as found,
        ):
            where = (
                f"grpc://{found['gRPC']}" if protocol == "grpc" else f"https://{found['HTTP']}/v1"
            )
            flags = [
                *"--rate 100 --requests 5 --prompt-tokens 5 --output-tokens 5 --vocab-size 200 "
                "--target".split(),
                where,
            ]
            for wrong in (tls, [*tls, "--token-file", str(tmp_path / "wrong")]):
                with pytest.raises(ConfigError, match=r"401|UNAUTHENTICATED"):
                    await measured([*flags, *wrong], empty())
            return await measured([*flags, *tls, "--token-file", str(tmp_path / "token")], empty())

    (point,) = asyncio.run(run()).points
    assert point.summary.ok == 5


def test_a_server_that_tells_only_admins(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")

    async def run() -> None:
        async with harness.running(tmp_path, tokens=BearerTokens(("secret",))) as server:
            flags = [
                "--rate",
                "1",
                "--target",
                f"grpc://{server.address}",
                "--token-file",
                str(tmp_path / "token"),
            ]
            await measured(flags, empty())

    with pytest.raises(
        ConfigError, match=r"tells only admins what it serves \(give --vocab-size\)"
    ):
        asyncio.run(run())


def test_refused_requests_are_counted(tmp_path: Path) -> None:
    """Sixty in a moment, four rows and eight places to wait in: some are served, some refused, none
    is lost.
    """

    words = io.StringIO()

    async def run() -> Report:
        limits = Limits(max_waiting_requests=8)
        async with harness.running(tmp_path, seconds=STEP, limits=limits) as server:
            flags = (
                "--rate 10000 --requests 60 --prompt-tokens 5 --output-tokens 5 --slo ttft=600000"
            ).split()
            return await measured([*flags, "--target", f"grpc://{server.address}"], empty(), words)

    report = asyncio.run(run())
    (point,) = report.points
    s = point.summary
    refused = point.summary.failures["RESOURCE_EXHAUSTED"]
    assert (
        s.ok > 0
        and refused.count > 0
        and s.ok + refused.count == 60
        and list(s.failures) == ["RESOURCE_EXHAUSTED"]
    )
    assert s.goodput_share == round(s.ok / 60, 4)
    said = f"{refused.count} x RESOURCE_EXHAUSTED: {refused.example}"
    assert said in words.getvalue() and said in report.text("md")
    assert report.text("md").splitlines()[2].split()[3:8:2] == ["60", str(s.ok), str(refused.count)]
    assert f"RESOURCE_EXHAUSTED:{refused.count}" in report.text("csv")
    assert "the generator was late" in point.warning


def test_cancelled_it_reports_what_it_has(tmp_path: Path) -> None:
    async def run() -> Report:
        async with harness.running(tmp_path, seconds=0.02) as server:
            flags = (
                "--rate 40 --requests 400 --prompt-tokens 5 --output-tokens 10 --warm-up 1".split()
            )
            measuring = asyncio.create_task(
                measured([*flags, "--target", f"grpc://{server.address}"], empty())
            )
            await harness.until(lambda: server.runner.steps > 40)
            measuring.cancel()
            report = await measuring
            await server.at_rest()  # what was in flight was cancelled
            return report

    (point,) = asyncio.run(run()).points
    s = point.summary
    assert point.interrupted and s.ok > 0 and s.unfinished > 0
    assert s.ok + s.unfinished == s.requests < 400


@pytest.mark.system
def test_a_signal_ends_the_program_with_a_report(tmp_path: Path) -> None:
    async def run() -> tuple[int, bytes, bytes]:
        async with harness.running(tmp_path, seconds=0.002) as server:
            flags = (
                "serve --rate 20 --requests 4000 --prompt-tokens 5 --output-tokens 2 --output json"
            ).split()
            command = [
                sys.executable,
                "-m",
                "jaxserve.bench",
                *flags,
                "--target",
                f"grpc://{server.address}",
            ]
            process = await asyncio.create_subprocess_exec(
                *command, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            await harness.until(lambda: server.runner.steps > 20)
            process.send_signal(signal.SIGINT)
            out, words = await process.communicate()
            assert process.returncode is not None
            return process.returncode, out, words

    code, out, words = asyncio.run(run())
    assert code == 130 and words.endswith(b"interrupted\n")
    (point,) = json.loads(out)["results"]
    assert point["interrupted"] and point["summary"]["ok"] > 0


def test_a_server_that_is_lost(tmp_path: Path) -> None:
    """Answers before the loss count, and later requests fail; the server reports nothing more."""
    report = empty()

    async def run() -> None:
        async with harness.running(tmp_path, seconds=0.02) as server:
            flags = (
                "--rate 40 --requests 40 --prompt-tokens 5 --output-tokens 10 --warm-up 1".split()
            )
            measuring = asyncio.create_task(
                measured([*flags, "--target", f"grpc://{server.address}"], report)
            )
            await harness.until(lambda: server.runner.steps > 40)
            await server.stop(0)
            with pytest.raises(CallError, match="UNAVAILABLE"):
                await measuring

    asyncio.run(run())
    (point,) = report.points
    s = point.summary
    assert (
        s.ok > 0
        and s.ok + sum(failure.count for failure in s.failures.values()) == 40
        and not point.interrupted
    )


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("", "no load was asked for"),
        ("--rate 0", "--rate is 0; it must be above 0"),
        ("--rate nan", "--rate is nan; it must be above 0"),
        ("--rate 1,x", "--rate is 1,x; it must be a list"),
        ("--rate 1 --concurrency 2", "give one of them"),
        ("--concurrency 1.5", "--concurrency is 1.5; it must be a list"),
        ("--rate 1 --requests 0", "--requests is 0; it must be above 0"),
        ("--rate 1 --timeout inf", "--timeout is inf; it must be at most 10,000,000"),
        ("--rate 1 --duration nan", "--duration is nan; it must be above 0"),
        ("--concurrency 1e9", "is 1e9; it must be a list"),
        ("--concurrency 1000000", "--concurrency is 1000000; it must be at most 50,000"),
        ("--rate 1 --prompt-tokens 99999999", "(at most 10,000,000)"),
        ("--rate 1 --repetitions 0", "--repetitions is 0; it must be above 0"),
        ("--rate 1 --output-tokens many", "'many' is not a length"),
        ("--rate 1 --slo ttft", "give milliseconds above 0"),
        ("--rate 1 --arrivals gamma", "need each other"),
        ("--rate inf --duration 5", "more than 10,000,000 requests"),
        ("--trace {folder}/none", "No such file"),
        ("--trace {folder}/odd", "neither Mooncake's JSON lines nor Azure's CSV"),
        ("--trace {folder}/odd --time-scale 2 --rate 1", "both say how fast"),
        ("--trace {folder}/odd --prompts-file {folder}/odd", "both say what is sent"),
        ("--rate 1 --prompts-file {folder}/none", "No such file"),
        (
            "--rate 1 --target grpc://127.0.0.1:{port} -- --dtype float32",
            "'--dtype' is for a server of our own",
        ),
        (
            "--rate 1 --target grpc://127.0.0.1:{port} --model DIR",
            "--model is for a server of our own",
        ),
        ("--rate 1 --tls-ca {folder}/odd", "for a server that is there"),
        ("--rate 1 --target grpc://127.0.0.1:{port} --token-file {folder}/none", "No such file"),
        (
            "--rate 1 --target 127.0.0.1:{port}",
            "it must be grpc://HOST:PORT or http://HOST:PORT/v1",
        ),
        ("--rate 1 --target grpc://127.0.0.1:{port}", "UNAVAILABLE"),
        ("--rate 1 --vocab-size 9 --target http://127.0.0.1:{port}", "no list of models"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, problem: str
) -> None:
    (tmp_path / "odd").write_text("a,b\n1,2\n")
    assert main(["serve", *flags.format(folder=tmp_path, port=free_ports(1)[0]).split()]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and problem in err and err.count("\n") == 1


def test_a_server_that_does_not_tell_its_vocabulary(tmp_path: Path) -> None:
    async def run() -> None:
        async with http_harness.serving(tmp_path) as http:
            await measured(["--rate", "1", "--target", f"{http.base}/v1"], empty())

    with pytest.raises(ConfigError, match="give --tokenizer, --vocab-size or --prompts-file"):
        asyncio.run(run())


def test_prompts_have_tokens_of_the_tokenizer_alone(tmp_path: Path) -> None:
    """Ids without a token, special tokens and those beyond the model's ids are not drawn."""
    folder = with_letters("llama_gqa", tmp_path / "model")

    async def run() -> Target:
        async with http_harness.serving(tmp_path) as http:
            flags = ["--target", f"{http.base}/v1", "--tokenizer", str(folder)]
            options = parse(["serve", "--rate", "1", *flags])
            async with target(options, Console(file=io.StringIO())) as seen:
                return seen

    seen = asyncio.run(run())
    drawn = set(range(seen.vocab_size or 0)) - set(seen.not_drawn)
    assert drawn == set(range(len(LETTERS))) - {HOLE}


def test_requests_that_do_not_fit(tmp_path: Path) -> None:
    async def run() -> None:
        async with harness.running(tmp_path) as server:
            flags = "--rate 1 --requests 2 --prompt-tokens 500 --output-tokens 100".split()
            await measured([*flags, "--target", f"grpc://{server.address}"], empty())

    with pytest.raises(
        ConfigError, match=r"2 of 2 requests do not fit .* 512 tokens, the first with 500 \+ 100"
    ):
        asyncio.run(run())
