"""What a host does to a server: it stops it, kills it, and takes its files and its memory."""

import json
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.client import CallError, Client, Delta, Finish
from tests.jaxserve.server.grpc.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    LAST,
    PING,
    PREFACE,
    SETTINGS,
    frame,
    headers_of,
)
from tests.jaxserve.server.test_serve_process import Process, children_of, launch

pytestmark = pytest.mark.system
TEXT = "Once upon a time"
LONG = 400  # tokens of an answer that is under way while something happens
GRAMMAR = {"response_format": {"type": "regex", "regex": "[ab]{3}"}}  # checked by a new process
USED = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@contextmanager
def started(ports: tuple[int, int] | None = None) -> Iterator[Process]:
    """Start a server that is ready; it ends by SIGTERM, unless the block has killed it."""
    process = launch(ports=ports)
    try:
        process.client().close()
        yield process
    finally:
        process.popen.terminate()
        code, text = process.wait()
    assert code in (0, -signal.SIGKILL), text


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    with started() as process:
        yield process


@pytest.fixture
def undisturbed(server: Process) -> Iterator[None]:
    """The server answers after the test as before, holds nothing, and has met no incident."""
    before = canary(server)
    connections = sockets_of(server)
    yield
    assert canary(server) == before
    until(lambda: at_rest(server))
    until(lambda: sockets_of(server) <= connections)
    assert "incident" not in "".join(server.lines)


def canary(server: Process) -> Any:
    """Return text and log-probabilities of a greedy answer."""
    body = {"prompt": TEXT, "temperature": 0, "max_tokens": 24, "logprobs": 2}
    answer = httpx.post(f"{server.http}/v1/completions", json=body, timeout=60).json()
    return answer["choices"]


def open_files(server: Process) -> list[str]:
    """Return what each descriptor of the server is; some are closed while they are looked at."""
    found = list[str]()
    for file in Path(f"/proc/{server.popen.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(file))
    return found


def sockets_of(server: Process) -> int:
    return sum(file.startswith("socket:") for file in open_files(server))


def at_rest(server: Process) -> bool:
    lines = httpx.get(f"{server.http}/metrics", timeout=60).text.splitlines()
    values = [
        line.rsplit(" ", 1)[1]
        for line in lines
        if line.startswith(tuple(f"jaxserve:{name}" for name in USED))
    ]
    assert len(values) >= len(USED)
    return not any(map(float, values))


def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds, a minute at most."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


@contextmanager
def limited(server: Process, kind: int, soft: int) -> Iterator[None]:
    """Lower one of the running server's limits."""
    pid = server.popen.pid
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, before)


@pytest.mark.usefixtures("undisturbed")
def test_a_server_that_is_stopped_for_a_while(server: Process) -> None:
    """What was under way goes on; deadlines pass meanwhile, the caller's and the server's."""
    with Client(server.grpc) as client:
        expected = client.generate(TEXT, temperature=0, max_tokens=LONG, ignore_eos=True)
        with (
            client.stream(TEXT, temperature=0, max_tokens=LONG, ignore_eos=True) as events,
            httpx.stream(
                "POST",
                f"{server.http}/v1/completions",
                json={"prompt": TEXT, "max_tokens": LONG, "ignore_eos": True, "stream": True},
                headers={"x-request-timeout": "3"},
                timeout=60,
            ) as late,
        ):
            first = next(events)
            server.popen.send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(CallError, match="Deadline"):
                    client.generate(TEXT, max_tokens=1, timeout=1)
                time.sleep(3)
            finally:
                server.popen.send_signal(signal.SIGCONT)
            rest = list(events)
            assert isinstance(rest[-1], Finish)
            text = "".join(event.text for event in (first, *rest) if isinstance(event, Delta))
            assert text == expected.choices[0].text
            *_, last = (line for line in late.iter_lines() if line)
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline"


@pytest.mark.usefixtures("undisturbed")
def test_no_files_are_left(server: Process) -> None:
    """New connections and new processes fail; connections that are open go on."""
    with httpx.Client(base_url=server.http, timeout=60) as known:
        assert known.get("/health").status_code == 200
        with ExitStack() as stack:
            files = len(open_files(server)) + 8
            stack.enter_context(limited(server, resource.RLIMIT_NOFILE, files))
            address = ("127.0.0.1", port_of(server.http))
            for _ in range(50):
                stack.enter_context(socket.create_connection(address, timeout=60))
            used = processor_seconds(server)
            assert known.get("/health").status_code == 200
            body = {"prompt": TEXT, "max_tokens": 4}
            assert known.post("/v1/completions", json=body).status_code == 200
            answer = known.post("/v1/completions", json=body | GRAMMAR)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "host_exhausted")
            assert processor_seconds(server) - used < 1
        answer = known.post("/v1/completions", json=body | GRAMMAR)
        assert answer.status_code == 200, answer.text


def processor_seconds(server: Process) -> float:
    times = Path(f"/proc/{server.popen.pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return sum(map(int, times[11:13])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.usefixtures("undisturbed")
def test_no_memory_is_left(server: Process) -> None:
    """A body whose values take more memory than there is ends its own request only."""
    pages = Path(f"/proc/{server.popen.pid}/statm").read_text().split()[0]
    size = int(pages) * resource.getpagesize()
    body = b'{"prompt": [' + b"1.5," * 1_900_000 + b"1]}"  # an object for each
    with httpx.Client(base_url=server.http, timeout=60) as known:
        assert known.get("/health").status_code == 200
        with limited(server, resource.RLIMIT_AS, size + 2**20):
            answer = known.post(
                "/v1/completions", content=body, headers={"content-type": "application/json"}
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "host_exhausted")
            assert known.get("/health").status_code == 200


@pytest.mark.usefixtures("undisturbed")
def test_malformed_calls_write_no_lines(server: Process) -> None:
    """gRPC's core would write one for each."""
    before = told(server)
    headers = headers_of("/a.B/C", (b"grpc-timeout", b"soon"))
    with socket.create_connection(("127.0.0.1", port_of(server.grpc)), timeout=60) as connection:
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0))
        for stream in range(1, 200, 2):
            connection.sendall(frame(HEADERS, END_HEADERS | END_STREAM, stream, headers))
        connection.sendall(frame(PING, 0, 0, LAST))
        received = b""
        while frame(PING, ACK, 0, LAST) not in received and (part := connection.recv(2**16)):
            received += part
    assert canary(server)
    assert told(server) == before


def told(server: Process) -> list[str]:
    """Return the lines of the log, but those that say now and then how busy the server is."""
    return [line for line in server.lines if not re.search(r"\brunning \d+ waiting", line)]


def test_a_killed_server_starts_again_on_its_ports() -> None:
    with started() as process:
        expected = canary(process)
        with process.client() as client:
            client.chat([{"role": "user", "content": TEXT}], max_tokens=1)
            (templates,) = children_of(process.popen.pid)
            with client.stream(TEXT, max_tokens=LONG, ignore_eos=True) as events:
                next(events)
                process.popen.kill()
                with pytest.raises(CallError) as failed:
                    list(events)
        assert failed.value.code == "UNAVAILABLE"
    until(lambda: not Path(f"/proc/{templates}").exists())
    with started(ports=(port_of(process.grpc), port_of(process.http))) as again:
        assert canary(again) == expected
    assert "found in the cache" in "".join(again.lines)


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])
