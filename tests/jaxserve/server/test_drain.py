"""One of two servers is drained under load, and no client notices.

Every request is answered, and computed by one server alone. Origins: calls that a server cancels as
it ends (grpc/grpc#41785), idle connections that it closes under a request (nodejs/node#60617), and
clients that are not told to connect anew (benoitc/gunicorn#2313).
"""

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
import uvloop
from grpc import aio  # type: ignore[attr-defined]

from jaxserve.client import AsyncClient
from jaxserve.server.core.limits import Limits
from jaxserve.server.grpc.server import INFERENCE
from jaxserve.server.http import connection as http_connection
from jaxserve.server.http import open_connections, output
from jaxserve.server.http import server as http_server
from jaxserve.server.http.listening import begin_no_more, listen
from jaxserve.server.lifecycle import Lifecycle
from jaxserve.server.options import CredentialOptions
from jaxserve.v1 import admin_pb2, common_pb2, inference_pb2, inference_pb2_grpc
from jaxserve.v1.admin_pb2_grpc import AdminServiceStub
from tests.jaxserve.client.test_connection import signed
from tests.jaxserve.server import proxies
from tests.jaxserve.server.harness import Running, running, until
from tests.jaxserve.server.http.harness import uvicorn_of
from tests.jaxserve.server.test_endings import outcome, start
from tests.jaxserve.server.test_lifecycle import living

MANY = 24  # callers
FEW = 2
ANSWERS = 6  # for each of them, before the drain and after it
TOKENS = 6
Ask = Callable[[str], Awaitable[object]]  # given the request's id; raises if the call is lost


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run on the event loop that the server has."""
    asyncio.run(main, loop_factory=uvloop.new_event_loop)


@dataclass
class Pair:
    """Two servers, each with its lifecycle."""

    servers: list[Running]
    lifecycles: list[Lifecycle]
    tasks: list["asyncio.Task[int]"]
    asked: int = 0
    answered: int = 0
    lost: list[str] = field(default_factory=list)

    def addresses(self, protocol: str) -> list[str]:
        return [f"127.0.0.1:{each.process.listeners.ports[protocol]}" for each in self.servers]

    async def drain_under_load(self, ask: Ask, callers: int = MANY) -> None:
        """Drain the first server while callers ask; check that none of them notices."""
        ended = asyncio.Event()

        async def call() -> None:
            while not ended.is_set():
                self.asked += 1
                name = f"r{self.asked}"
                try:
                    await asyncio.wait_for(ask(name), 60)
                    self.answered += 1
                except (grpc.RpcError, httpx.HTTPError, AssertionError) as error:
                    self.lost.append(f"{name}: {error}"[:300])

        calling = [asyncio.create_task(call()) for _ in range(callers)]
        await until(lambda: self.answered > ANSWERS * callers)
        self.lifecycles[0].drain()
        assert await asyncio.wait_for(self.tasks[0], 60) == 0
        after = self.answered
        await until(lambda: self.answered > after + ANSWERS * callers)
        ended.set()
        await asyncio.gather(*calling)
        assert not self.lost, (len(self.lost), self.asked, self.lost[:3])
        computed = [set(each.runner.launches) for each in self.servers]
        assert all(computed), "both servers have answered"
        assert not computed[0] & computed[1]
        assert len(computed[0] | computed[1]) == self.answered == self.asked


@asynccontextmanager
async def pair(folder: Path, **options: Any) -> AsyncIterator[Pair]:
    """Two servers that answer; options: of `running`."""
    async with AsyncExitStack() as stack:
        found = Pair([], [], [])
        for number in range(2):
            place = folder / str(number)
            place.mkdir()
            server = await stack.enter_async_context(
                running(place, seconds=0.001, opened=False, **options)
            )
            lifecycle, task = await stack.enter_async_context(living(server))
            found.servers.append(server)
            found.lifecycles.append(lifecycle)
            found.tasks.append(task)
        yield found


# ---- HTTP


def completion(name: str, **given: Any) -> dict[str, Any]:
    return {"prompt": "a fox", "max_tokens": TOKENS, "seed": 1, "request_id": name} | given


def posting(client: httpx.AsyncClient) -> Ask:
    async def ask(name: str) -> None:
        is_stream = int(name[1:]) % 3 == 0
        response = await client.post("/v1/completions", json=completion(name, stream=is_stream))
        assert response.status_code == 200, response.text
        assert not is_stream or response.text.endswith("data: [DONE]\n\n")

    return ask


def over(path: Path) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    return httpx.AsyncClient(transport=transport, base_url="http://proxy", timeout=60)


NGINX_KEEPS = """
  upstream servers { SERVERS keepalive 32; }
  server {
    listen {socket};
    location / {
      proxy_pass http://servers; proxy_http_version 1.1; proxy_set_header Connection "";
    }
  }
"""
NGINX_CONNECTS_ANEW = """
  upstream servers { SERVERS }
  server { listen {socket}; location / { proxy_pass http://servers; } }
"""


@pytest.mark.system
@pytest.mark.parametrize("callers", [MANY, FEW])
@pytest.mark.parametrize("http", [NGINX_KEEPS, NGINX_CONNECTS_ANEW], ids=["keeps", "anew"])
def test_http_behind_nginx(tmp_path: Path, http: str, callers: int) -> None:
    """Idle connections of a proxy stay open for its next request (nodejs/node#60617)."""

    async def main() -> None:
        async with pair(tmp_path, http=True) as servers:
            lines = " ".join(f"server {each};" for each in servers.addresses("HTTP"))
            with proxies.nginx(tmp_path, http.replace("SERVERS", lines)) as path:
                async with over(path) as client:
                    await servers.drain_under_load(posting(client), callers)

    run(main())


HAPROXY_HTTP = """
listen front
  mode http
  bind {socket}
  balance roundrobin
  http-reuse REUSE
"""


@pytest.mark.system
@pytest.mark.parametrize("reuse", ["never", "safe", "always"])
def test_http_behind_haproxy(tmp_path: Path, reuse: str) -> None:
    async def main() -> None:
        async with pair(tmp_path, http=True) as servers:
            lines = [f"  server s{i} {each}" for i, each in enumerate(servers.addresses("HTTP"))]
            config = HAPROXY_HTTP.replace("REUSE", reuse) + "\n".join(lines)
            with proxies.haproxy(tmp_path, config) as path:
                async with over(path) as client:
                    await servers.drain_under_load(posting(client))

    run(main())


# ---- gRPC

ROUND_ROBIN = {"loadBalancingConfig": [{"round_robin": {}}]}
WATCHES = ROUND_ROBIN | {"healthCheckConfig": {"serviceName": INFERENCE}}
RETRIES = ROUND_ROBIN | {
    "methodConfig": [
        {
            "name": [{"service": INFERENCE}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            },
        }
    ]
}


def target(*addresses: str) -> str:
    return f"ipv4:{','.join(addresses)}"


def generate(name: str) -> inference_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(seed=1, max_tokens=TOKENS)
    return inference_pb2.GenerateRequest(text="a fox", sampling=sampling, request_id=name)


@pytest.mark.parametrize("callers", [MANY, FEW])
@pytest.mark.parametrize("config", [WATCHES, RETRIES], ids=["watches", "retries"])
def test_grpc_with_two_addresses(tmp_path: Path, config: dict[str, Any], callers: int) -> None:
    """gRPC's library cancels calls that arrive before their client has heard (grpc/grpc#41785)."""
    options = [("grpc.service_config", json.dumps(config))]

    async def main() -> None:
        async with pair(tmp_path) as servers:
            address = target(*servers.addresses("gRPC"))
            async with aio.insecure_channel(address, options) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                await servers.drain_under_load(lambda name: stub.Generate(generate(name)), callers)

    run(main())


@asynccontextmanager
async def our_clients(*addresses: str) -> AsyncIterator[Ask]:
    """A client for each address, which take turns."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(each)) for each in addresses]

        async def ask(name: str) -> None:
            client = clients[int(name[1:]) % len(clients)]
            await client.generate("a fox", seed=1, max_tokens=TOKENS, request_id=name)

        yield ask


@pytest.mark.parametrize("callers", [MANY, FEW])
def test_our_client_with_two_addresses(tmp_path: Path, callers: int) -> None:
    async def main() -> None:
        async with pair(tmp_path) as servers:
            first, second = servers.addresses("gRPC")
            async with our_clients(target(first, second), target(second, first)) as ask:
                await servers.drain_under_load(ask, callers)

    run(main())


NGINX_GRPC = """
  upstream servers { SERVERS keepalive 32; }
  server {
    listen {socket} http2;
    location / { grpc_pass grpc://servers; grpc_next_upstream error timeout non_idempotent; }
  }
"""


@pytest.mark.system
def test_grpc_behind_nginx(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as servers:
            lines = " ".join(f"server {each};" for each in servers.addresses("gRPC"))
            with proxies.nginx(tmp_path, NGINX_GRPC.replace("SERVERS", lines)) as path:
                async with our_clients(f"unix:{path}") as ask:
                    await servers.drain_under_load(ask)

    run(main())


HAPROXY_GRPC = """
listen front
  mode MODE
  bind {socket} PROTOCOL
  balance roundrobin
"""


@pytest.mark.system
@pytest.mark.parametrize("mode, protocol", [("tcp", ""), ("http", "proto h2")])
def test_grpc_behind_haproxy(tmp_path: Path, mode: str, protocol: str) -> None:
    """In mode tcp each connection of a client goes to one server, in mode http each call."""

    async def main() -> None:
        async with pair(tmp_path) as servers:
            lines = [
                f"  server s{i} {each} {protocol}"
                for i, each in enumerate(servers.addresses("gRPC"))
            ]
            config = HAPROXY_GRPC.replace("MODE", mode).replace("PROTOCOL", protocol)
            with proxies.haproxy(tmp_path, config + "\n".join(lines)) as path:
                # Channels of one process share connections unless their options differ.
                ways = [f"unix:{path}", f"unix://{path}"]
                async with our_clients(*ways) as ask:
                    await servers.drain_under_load(ask)

    run(main())


# ---- one connection, one server

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def request_of(name: str) -> bytes:
    body = json.dumps(completion(name)).encode()
    return HEAD + b"content-length: %d\r\n\r\n%s" % (len(body), body)


async def http_port(server: Running) -> int:
    """Return the port of HTTP, once the server listens on it."""
    await until(lambda: uvicorn_of(server).started)
    return server.process.listeners.ports["HTTP"]


async def response_of(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Read one response and return its head and its body."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).lower()
    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    return head, await reader.readexactly(length)


def test_a_kept_connection_serves_its_next_request_and_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that obeys Retry-After on the same connection would never leave
    (benoitc/gunicorn#2313). However long the connection was idle.
    """
    passed = stopped_clock(monkeypatch)

    async def main() -> None:
        async with (
            running(tmp_path, http=True, opened=False) as server,
            living(server) as (lifecycle, task),
        ):
            port = await http_port(server)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_of("before"))
            head, _ = await response_of(reader)
            assert b" 200 " in head and b"connection: close" not in head
            passed[0] += 10 * http_server.LINGER
            lifecycle.drain()
            await until(lambda: not _accepts(port))
            writer.write(request_of("after"))
            head, body = await response_of(reader)
            assert b" 200 " in head and b"connection: close" in head and b"after" in body
            assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()
            passed[0] += http_server.LINGER
            assert await task == 0

    run(main())


def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stop the clock of HTTP's connections; return its time, which the test sets."""
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: passed[0])
    for module in (http_server, http_connection, open_connections, output):
        monkeypatch.setattr(module, "time", clock)
    return passed


def _accepts(port: int) -> bool:
    """Return whether connections are not refused; an unanswered one is none."""
    with socket.socket() as probe:
        probe.settimeout(0.05)
        return probe.connect_ex(("127.0.0.1", port)) != errno.ECONNREFUSED


def test_connections_that_nobody_has_accepted_yet_are_served(tmp_path: Path) -> None:
    """They are whole for their clients, which have sent their requests."""

    async def main() -> None:
        async with (
            running(tmp_path, http=True, opened=False) as server,
            living(server) as (lifecycle, task),
        ):
            address = "127.0.0.1", await http_port(server)
            waiting = [socket.create_connection(address) for _ in range(100)]
            for number, each in enumerate(waiting):
                each.sendall(request_of(f"r{number}"))
                each.setblocking(False)
            lifecycle.drain()
            for each in waiting:
                reader, writer = await asyncio.open_connection(sock=each)
                head, _ = await response_of(reader)
                assert b" 200 " in head and b"connection: close" in head
                writer.close()
            assert await task == 0

    run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux's kernel")
def test_no_connection_begins_between_the_last_accept_and_the_close() -> None:
    """One that did would be reset with its request, which no proxy repeats (nodejs/node#60617)."""
    with contextlib.closing(*listen("127.0.0.1", 0)) as listener:
        listener.listen()
        address = listener.getsockname()
        with socket.create_connection(address) as first, socket.socket() as second:
            begin_no_more(listener)
            second.settimeout(0.05)
            with pytest.raises(TimeoutError):
                second.connect(address)
            accepted, peer = listener.accept()
            accepted.close()
            assert peer == first.getsockname()
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_an_idle_connection_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = stopped_clock(monkeypatch)

    async def main() -> None:
        async with (
            running(tmp_path, http=True, opened=False) as server,
            living(server) as (lifecycle, task),
        ):
            port = await http_port(server)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_of("one"))
            await response_of(reader)
            lifecycle.drain()
            await until(lambda: not _accepts(port))
            assert server.process.listeners.in_use and not task.done()
            passed[0] += http_server.LINGER
            assert await asyncio.wait_for(reader.read(), 60) == b""
            assert await task == 0
            writer.close()

    run(main())


def test_the_port_of_administrators_stays_open(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            running(tmp_path, opened=False, admin_port=0) as server,
            living(server) as (lifecycle, task),
        ):
            port = server.process.listeners.ports["admin"]
            with server.holding(step=3):
                call = start(server, "unary")
                await until(lambda: server.runner.steps == 3)
                lifecycle.drain()
                await until(
                    lambda: server.channel.get_state() is not grpc.ChannelConnectivity.READY
                )
                async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                    loads = await AdminServiceStub(channel).GetLoads(admin_pb2.GetLoadsRequest())
                assert loads.requests == 1
            assert await outcome(call, "unary") == "OK"
            assert await task == 0

    run(main())


def test_a_signal_does_not_cut_a_drain_that_was_asked_for(tmp_path: Path) -> None:
    """A supervisor sends it as soon as health checks fail."""
    codes: list[int] = []

    async def main() -> None:
        async with running(tmp_path, opened=False) as server, living(server) as (lifecycle, task):
            lifecycle.exit = codes.append
            lifecycle.watch_signals()
            with server.holding(step=3):
                call = start(server, "unary")
                await until(lambda: server.runner.steps == 3)
                lifecycle.drain()
                for seen in ([], [128 + signal.SIGTERM]):
                    os.kill(os.getpid(), signal.SIGTERM)
                    await asyncio.sleep(0.05)
                    assert codes == seen
            assert await outcome(call, "unary") == "OK"
            assert await task == 0

    run(main())


@pytest.mark.system
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program")
def test_a_tls_client_that_never_says_goodbye_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """The library would wait half a minute for it."""
    cert, key = signed(tmp_path, "server")
    files = CredentialOptions(tls_cert=cert, tls_key=key)

    def kept_connection(port: int) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=str(cert))
        plain = socket.create_connection(("127.0.0.1", port))
        connection = context.wrap_socket(plain, server_hostname="127.0.0.1")
        connection.sendall(request_of("one"))
        assert b" 200 " in connection.recv(2**16)
        return connection

    async def main() -> None:
        async with (
            running(tmp_path, http=True, opened=False, credentials=files) as server,
            living(server) as (lifecycle, task),
        ):
            with await asyncio.to_thread(kept_connection, await http_port(server)):
                lifecycle.drain()
                assert await asyncio.wait_for(task, 20) == 0

    run(main())


@pytest.mark.system
def test_an_idle_connection_is_closed_after_its_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, http=True, limits=Limits(keep_alive_seconds=0.2)) as server:
            port = await http_port(server)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for name in ("one", "two"):
                writer.write(request_of(name))
                assert b" 200 " in (await response_of(reader))[0]
            assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()

    run(main())
