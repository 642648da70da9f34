"""The load generator against servers on the fake device, and against none."""

import asyncio
import io
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from benchmarks.serving import account, main, measure
from benchmarks.serving_flags import arrivals_of, check, parser
from benchmarks.serving_report import Report
from rich.console import Console

from jaxserve.bench.latency import Objective
from jaxserve.bench.own_server import free_ports, running
from jaxserve.client import CallError
from jaxserve.errors import ConfigError
from jaxserve.server.limits import Limits
from jaxserve.server.tokens import Tokens
from tests.jaxserve.client.test_connection import signed
from tests.jaxserve.server import harness, http_harness
from tests.jaxserve.server.test_tls import listening

STEP = 0.004  # seconds of the device


async def measured(flags: Sequence[str], report: Report) -> Report:
    """As `main` does it, on this event loop; cancelled, it returns."""
    args = parser("").parse_args(flags)
    check(args)
    plans, cut = arrivals_of(args)
    report.account |= account(args)
    report.objective = Objective(args.slo_ttft_ms, args.slo_tpot_ms)
    with suppress(asyncio.CancelledError):
        await measure(args, plans, cut, report)
    report.close()
    return report


def empty(out: Path | None = None) -> Report:
    return Report({}, Objective(), out, Console(file=io.StringIO(), width=200))


def said(report: Report) -> str:
    assert isinstance(report.console.file, io.StringIO)
    return report.console.file.getvalue()


def test_rates_over_grpc(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = "--rates 100,200 --requests 12 --prompt-tokens 5-40 --output-tokens 6 --slo-ttft-ms 10000".split()

    async def run() -> Report:
        async with harness.running(tmp_path, seconds=STEP) as server:
            report = await measured([*flags, "--address", server.address], empty(out))
            await server.at_rest()
            return report

    report = asyncio.run(run())
    assert len(report.points) == 2
    for point in report.points:
        s = point.summary
        assert (s.requests, s.ok, s.unfinished, s.failures, point.interrupted) == (12, 12, 0, {}, False)
        assert s.ttft and s.tpot and s.itl and s.e2e
        assert s.ttft.p50 >= 1e3 * STEP and s.tpot.p50 >= 0.9e3 * STEP and s.e2e.p50 >= 6e3 * STEP
        assert s.output_tokens_per_second == pytest.approx(12 * 6 / s.busy_seconds, rel=0.05)
        assert (s.cached_prompt_tokens, s.goodput_share) == (0, 1.0)
    assert report.points[0].rate == pytest.approx(report.points[1].rate / 2, rel=1e-3)
    written = json.loads(out.read_text())
    assert [point["summary"]["ok"] for point in written["points"]] == [12, 12]
    assert written["servers"]["fake"]["device_kind"] == "fake" and written["asked"]["requests"] == 12
    assert out.with_suffix(".md").read_text().count("| fake |") == 2
    assert out.with_suffix(".svg").read_text().count("<polyline") == 4


@pytest.mark.parametrize("protocol", ["grpc", "openai"])
def test_a_trace_with_shared_blocks(tmp_path: Path, protocol: str) -> None:
    """Blocks of 16 tokens in pages of 4: the second request finds the 32 tokens that it shares with the first."""
    rows = [
        {"timestamp": 0, "input_length": 1200, "output_length": 96, "hash_ids": [0, 1, 2]},
        {"timestamp": 9000, "input_length": 1400, "output_length": 320, "hash_ids": [0, 1, 3]},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    flags = ["--trace", str(trace), "--time-scale", "0.05", "--token-scale", str(16 / 512), "--max-output-tokens", "8"]

    async def run() -> Report:
        async with http_harness.serving(tmp_path) as http:
            where = ["--address", http.server.address, "--protocol", protocol, "--url", http.base]
            return await measured([*flags, *where], empty())

    (point,) = asyncio.run(run()).points
    s = point.summary
    assert (s.ok, point.capped, s.prompt_tokens, s.cached_prompt_tokens) == (2, 1, 32 + 6 + 32 + 12, 32)
    assert s.busy_seconds == pytest.approx(0.45, abs=0.2)


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
            where = ["--address", found["gRPC"], "--protocol", protocol, "--url", f"https://{found['HTTP']}"]
            flags = [*"--rate 100 --requests 5 --prompt-tokens 5 --output-tokens 5 --vocab-size 200".split(), *where]
            for wrong in (tls, [*tls, "--token-file", str(tmp_path / "wrong")]):
                with pytest.raises(ConfigError, match=r"401|UNAUTHENTICATED"):
                    await measured([*flags, *wrong], empty())
            return await measured([*flags, *tls, "--token-file", str(tmp_path / "token")], empty())

    (point,) = asyncio.run(run()).points
    assert point.summary.ok == 5


def test_a_server_that_tells_only_admins(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")

    async def run() -> None:
        async with harness.running(tmp_path, tokens=Tokens("secret", None)) as server:
            flags = ["--rate", "1", "--address", server.address, "--token-file", str(tmp_path / "token")]
            await measured(flags, empty())

    with pytest.raises(ConfigError, match=r"tells only admins what it serves \(give --vocab-size\)"):
        asyncio.run(run())


def test_refused_requests_are_counted(tmp_path: Path) -> None:
    """Sixty in a moment, four rows and eight places to wait in: some are served, some refused, none is lost."""

    async def run() -> Report:
        limits = Limits(max_waiting_requests=8)
        async with harness.running(tmp_path, seconds=STEP, limits=limits) as server:
            flags = "--rate 10000 --requests 60 --prompt-tokens 5 --output-tokens 5 --slo-ttft-ms 10000".split()
            return await measured([*flags, "--address", server.address], empty())

    report = asyncio.run(run())
    (point,) = report.points
    s, refused = point.summary, point.summary.failures["RESOURCE_EXHAUSTED"]
    assert s.ok > 0 and refused.count > 0 and s.ok + refused.count == 60 and list(s.failures) == ["RESOURCE_EXHAUSTED"]
    assert s.goodput_share == round(s.ok / 60, 4)
    assert f"{refused.count} x RESOURCE_EXHAUSTED: {refused.example}" in said(report)
    assert "the generator was late" in point.warning


def test_cancelled_it_reports_what_it_has(tmp_path: Path) -> None:
    async def run() -> Report:
        async with harness.running(tmp_path, seconds=0.02) as server:
            flags = "--rate 40 --requests 400 --prompt-tokens 5 --output-tokens 10 --warm-up 1".split()
            measuring = asyncio.create_task(measured([*flags, "--address", server.address], empty()))
            await asyncio.sleep(1.2)
            measuring.cancel()
            report = await measuring
            await server.at_rest()  # what was in flight was cancelled
            return report

    (point,) = asyncio.run(run()).points
    s = point.summary
    assert point.interrupted and s.ok > 0 and s.unfinished > 0
    assert s.ok + s.unfinished == s.requests < 400


def test_a_signal_ends_the_program_with_a_report(tmp_path: Path) -> None:
    out = tmp_path / "out.json"

    async def run() -> tuple[int, bytes]:
        async with harness.running(tmp_path, seconds=0.002) as server:
            flags = "--rate 20 --requests 4000 --prompt-tokens 5 --output-tokens 2".split()
            command = [sys.executable, "-m", "benchmarks.serving", *flags, "--address", server.address, "--out", out]
            process = await asyncio.create_subprocess_exec(
                *command, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
            )
            while server.runner.steps < 20:
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, words = await process.communicate()
            assert process.returncode is not None
            return process.returncode, words

    assert asyncio.run(run()) == (130, b"interrupted\n")
    (point,) = json.loads(out.read_text())["points"]
    assert point["interrupted"] and point["summary"]["ok"] > 0


def test_a_server_that_is_lost(tmp_path: Path) -> None:
    """What was answered stands, the others are failures, and nobody is left to say how it went."""
    report = empty()

    async def run() -> None:
        async with harness.running(tmp_path, seconds=0.02) as server:
            flags = "--rate 40 --requests 40 --prompt-tokens 5 --output-tokens 10 --warm-up 1".split()
            measuring = asyncio.create_task(measured([*flags, "--address", server.address], report))
            while server.runner.steps < 40:
                await asyncio.sleep(0.01)
            await server.stop(0)
            with pytest.raises(CallError, match="UNAVAILABLE"):
                await measuring

    asyncio.run(run())
    (point,) = report.points
    s = point.summary
    assert s.ok > 0 and s.ok + sum(failure.count for failure in s.failures.values()) == 40 and not point.interrupted


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("", "no load was asked for"),
        ("--rate 0", "a rate of 0 requests/s: it must be above 0"),
        ("--rates 1,x", "--rates '1,x' is not a list"),
        ("--rate 1 --rates 2", "give one of them"),
        ("--rate 1 --requests 0", "--requests 0: it must be above 0"),
        ("--rate 1 --output-tokens many", "'many' is not a length"),
        ("--trace {folder}/none", "No such file"),
        ("--trace {folder}/odd", "neither Mooncake's JSON lines nor Azure's CSV"),
        ("--trace {folder}/odd --time-scale 2 --rate 1", "both say how fast"),
        ("--rate 1 --presets fast", "choose of latency,balanced,throughput"),
        ("--rate 1 -- --dtype float32", "'--dtype' is for a server of our own"),
        ("--rate 1 --presets --vocab-size 9", "--vocab-size is for"),
        ("--rate 1 --presets --tls-ca {folder}/odd", "asked in plain text"),
        ("--rate 1 --token-file {folder}/none", "No such file"),
        ("--rate 1 --out {folder}/no/out.json", "there is no folder"),
        ("--rate 1 --address 127.0.0.1:{port}", "UNAVAILABLE"),
        ("--rate 1 --protocol openai --vocab-size 9 --url http://127.0.0.1:{port}", "no list of models"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, problem: str
) -> None:
    (tmp_path / "odd").write_text("a,b\n1,2\n")
    assert main(flags.format(folder=tmp_path, port=free_ports(1)[0]).split()) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and problem in err and err.count("\n") == 1


def test_requests_that_do_not_fit(tmp_path: Path) -> None:
    async def run() -> None:
        async with harness.running(tmp_path) as server:
            flags = "--rate 1 --requests 2 --prompt-tokens 500 --output-tokens 100".split()
            await measured([*flags, "--address", server.address], empty())

    with pytest.raises(ConfigError, match=r"2 of 2 requests do not fit .* 512 tokens, the first with 500 \+ 100"):
        asyncio.run(run())


# ---- servers of our own


def test_a_server_that_ends_before_it_is_ready() -> None:
    async def run() -> None:
        words = "import sys; print('first', file=sys.stderr); print('error: --model X: no such folder'); sys.exit(3)"
        async with running([sys.executable, "-c", words], f"127.0.0.1:{free_ports(1)[0]}", 60):
            pytest.fail("it was never ready")

    with pytest.raises(ConfigError, match="ended with exit code 3: --model X: no such folder"):
        asyncio.run(run())


@pytest.mark.parametrize("deaf", [False, True])
def test_a_server_always_ends(tmp_path: Path, deaf: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted while it starts; one of them does not listen to SIGTERM."""
    monkeypatch.setattr("benchmarks.own_server.END_SECONDS", 0.2)
    here = tmp_path / "pid"
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if deaf else ""
    script = f"import os, pathlib, signal, time; {ignore} pathlib.Path({str(here)!r}).write_text(str(os.getpid())); "
    command = [sys.executable, "-c", script + "time.sleep(600)"]

    async def start() -> None:
        async with running(command, f"127.0.0.1:{free_ports(1)[0]}", 60):
            pytest.fail("it was never ready")

    async def run() -> None:
        starting = asyncio.create_task(start())
        while not (here.exists() and here.read_text()):
            await asyncio.sleep(0.01)
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting

    began = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - began < 30
    assert not Path(f"/proc/{here.read_text()}").exists()
