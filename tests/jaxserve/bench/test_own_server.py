"""Servers that the load generator starts and ends itself."""

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path

import jax
import pytest

from jaxserve.bench.__main__ import main
from jaxserve.bench.own_server import free_ports, running
from jaxserve.errors import ConfigError

pytestmark = pytest.mark.system


@pytest.mark.slow
def test_without_a_target_a_server_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    model = Path(__file__).parents[3] / "checkpoints" / "bundled" / "tiny-chat-draft"
    flags = (
        "serve --concurrency 2 --requests 4 --prompt-tokens 8 --output-tokens 4 --output json"
    ).split()
    cache = ["--compilation-cache", jax.config.jax_compilation_cache_dir]
    sizes = "--max-batch 2 --step-tokens 16 --page-size 16 --max-context 32".split()
    assert main([*flags, "--model", str(model), "--", *sizes, *cache]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["results"][0]["summary"]["ok"] == 4 and found["compiles_after_ready"] == 0
    assert (found["server"]["model"], found["server"]["about"]["max_batch"]) == (model.name, 2)


def test_a_server_that_ends_before_it_is_ready() -> None:
    async def run() -> None:
        words = (
            "import sys; print('first', file=sys.stderr); print('error: --model X: no such "
            "folder'); sys.exit(3)"
        )
        async with running([sys.executable, "-c", words], f"127.0.0.1:{free_ports(1)[0]}", 60):
            pytest.fail("it was never ready")

    with pytest.raises(ConfigError, match="ended with exit code 3: --model X: no such folder"):
        asyncio.run(run())


@pytest.mark.parametrize("deaf", [False, True])
def test_a_server_always_ends(tmp_path: Path, deaf: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted while it starts; one of them does not listen to SIGTERM."""
    monkeypatch.setattr("jaxserve.bench.own_server.END_SECONDS", 0.2)
    here = tmp_path / "pid"
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if deaf else ""
    script = (
        f"import os, pathlib, signal, time; {ignore} "
        f"pathlib.Path({str(here)!r}).write_text(str(os.getpid())); "
    )
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

    asyncio.run(run())
    assert not Path(f"/proc/{here.read_text()}").exists()
