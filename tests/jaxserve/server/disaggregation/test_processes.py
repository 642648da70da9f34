"""A prefill server and a decode server as an operator starts them, in processes of their own."""

import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxserve.client import TLS, Client
from tests.jaxserve.client.test_connection import signed
from tests.jaxserve.server.test_serve_process import Process, get, launch

pytestmark = pytest.mark.system
STORY = (
    "Once upon a time there was a fox who wanted to learn to play the flute. " * 12
)  # some 250 tokens


def metric(server: Process, name: str) -> float:
    """Return the sum of a metric over its labels."""
    lines = [
        line
        for line in get(f"{server.http}/metrics").decode().splitlines()
        if line.startswith(f"jaxserve:{name}")
    ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def wait_for(server: Process, name: str, value: float) -> None:
    end = time.monotonic() + 120
    while metric(server, name) != value:
        assert time.monotonic() < end, (name, metric(server, name), "".join(server.lines))
        time.sleep(0.1)


READY = 'disaggregation_prefill_servers{state="ready"}'
REMOTE = 'disaggregation_decisions_total{decision="remote"}'


@contextmanager
def launched(*flags: str) -> Iterator[Process]:
    """Launch a server until SIGTERM drains it, unless it was killed."""
    process = launch(*flags)
    try:
        yield process
    finally:
        process.popen.send_signal(signal.SIGTERM)
        code, text = process.wait()
    assert code in (0, -signal.SIGKILL), text


def decodes(prefill: Process) -> tuple[str, ...]:
    return "--role", "decode", "--prefill-server", prefill.grpc, "--prefill-threshold", "64"


def ask(client: Client, number: int) -> str:
    return client.generate(f"{number}. {STORY}", max_tokens=8, temperature=0).choices[0].text


@pytest.fixture(scope="module")
def plain() -> Iterator[list[str]]:
    """Return the answers of a server that computes its own prompts."""
    with launched() as server, server.client() as client:
        found = [ask(client, number) for number in range(3)]
    yield found


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program")
def test_tokens_and_certificates_between_them(tmp_path: Path, plain: list[str]) -> None:
    theirs, their_key = signed(tmp_path, "prefill")
    ours, our_key = signed(tmp_path, "decode")
    token = tmp_path / "token"
    token.write_text("between-servers")
    prefills = (
        *("--role", "prefill", "--token-file", str(token)),
        *("--tls-cert", str(theirs), "--tls-key", str(their_key), "--tls-client-ca", str(ours)),
    )
    credentials = (
        *("--prefill-token-file", str(token), "--prefill-tls-ca", str(theirs)),
        *("--tls-cert", str(ours), "--tls-key", str(our_key), "--no-http"),
    )
    with (
        launched(*prefills) as prefill,
        launched(*decodes(prefill), *credentials) as decode,
        Client(decode.grpc, tls=TLS(ca=ours)) as client,
    ):
        while not any("is ready" in line for line in decode.lines):
            assert decode.popen.poll() is prefill.popen.poll() is None, "".join(
                decode.lines + prefill.lines
            )
            time.sleep(0.1)
        client.wait_ready(timeout=60)
        result = client.generate(f"0. {STORY}", max_tokens=8, temperature=0)
        assert result.choices[0].text == plain[0]
        assert result.usage.cached_prompt_tokens > result.usage.prompt_tokens - 65


@pytest.mark.slow
def test_a_prefill_server_is_killed(plain: list[str]) -> None:
    """Killed while idle, and while computing: requests are computed here until another one is
    there.
    """
    with (
        launched("--role", "prefill") as prefill,
        launched(*decodes(prefill)) as decode,
        decode.client() as client,
    ):
        wait_for(decode, READY, 1)
        assert ask(client, 0) == plain[0]
        assert metric(decode, REMOTE) == 1 and metric(decode, "disaggregation_failures_total") == 0
        assert metric(decode, "disaggregation_received_bytes_total") > 0
        assert metric(prefill, "disaggregation_sent_bytes_total") == metric(
            decode, "disaggregation_received_bytes_total"
        )
        for server in (prefill, decode):
            assert metric(server, "compiles_after_ready") == 0
        prefill.popen.send_signal(signal.SIGSTOP)
        killer = threading.Timer(1.0, prefill.popen.kill)
        killer.start()
        assert ask(client, 1) == plain[1]
        killer.join()
        assert metric(decode, "disaggregation_failures_total") == 1
        wait_for(decode, READY, 0)
        assert ask(client, 2) == plain[2]
        assert metric(decode, "compiles_after_ready") == 0
