"""The channel's options by what they do, TLS, and waiting for a server."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from jaxserve.client import TLS, CallError, Client, Finish
from jaxserve.client import connection as base
from jaxserve.errors import ConfigError
from jaxserve.v1 import common_pb2, inference_pb2_grpc
from jaxserve.v1 import inference_pb2 as pb
from tests.jaxserve.client.test_client import GREEDY, Looping, both, opened
from tests.jaxserve.server.harness import running

PREFACE = len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
PING = 6
ACK = 1


class Large(inference_pb2_grpc.InferenceServiceServicer):
    """Answers with as many bytes of text as the prompt says."""

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> pb.GenerateResponse:
        finish = common_pb2.ChoiceFinish(reason=common_pb2.FINISH_REASON_STOP)
        return pb.GenerateResponse(choices=[pb.Choice(text="x" * int(request.text), finish=finish)])


@contextmanager
def serving(credentials: grpc.ServerCredentials | None = None) -> Iterator[int]:
    """Run a server and yield its port."""
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, options=[("grpc.max_send_message_length", -1)])
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(Large(), server)
        add = (
            (lambda a: server.add_secure_port(a, credentials))
            if credentials
            else server.add_insecure_port
        )
        port = add("127.0.0.1:0")
        server.start()
        try:
            yield port
        finally:
            server.stop(0).wait()


def test_answers_up_to_64_mebibytes() -> None:
    with serving() as port, Client(f"127.0.0.1:{port}") as client:
        assert len(client.generate(str(60 * 2**20)).choices[0].text) == 60 * 2**20
        with pytest.raises(CallError, match="larger than max") as caught:
            client.generate(str(65 * 2**20))
        assert caught.value.code == "RESOURCE_EXHAUSTED"


class Wire:
    """Bytes between a client and a server; after `cut` they are dropped in silence."""

    def __init__(self) -> None:
        self.sent = bytearray()  # by the client
        self.cut = False
        self.address = ""
        self._pumps: list[asyncio.Task[None]] = []

    async def connect(
        self, client: asyncio.StreamReader, back: asyncio.StreamWriter, port: int
    ) -> None:
        server, there = await asyncio.open_connection("127.0.0.1", port)
        self._pumps += [
            asyncio.create_task(self._pump(client, there, self.sent.extend)),
            asyncio.create_task(self._pump(server, back, lambda data: None)),
        ]

    async def _pump(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        note: Callable[[bytes], object],
    ) -> None:
        try:
            while data := await source.read(65536):
                if not self.cut:
                    note(data)
                    target.write(data)
        finally:
            target.close()

    async def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def pings(self) -> int:
        """Return how many PING frames the client sent that are no answers."""
        count = 0
        at = PREFACE
        while at + 9 <= len(self.sent):
            length = int.from_bytes(self.sent[at : at + 3])
            kind = self.sent[at + 3]
            flags = self.sent[at + 4]
            if kind == PING and not flags & ACK:
                count += 1
            at += 9 + length
        return count


@asynccontextmanager
async def relay(address: str, port: int = 0) -> AsyncIterator[Wire]:
    """Relay connections to a port, by default a free one, to the server at `address`."""
    wire = Wire()
    server_port = int(address.rpartition(":")[2])
    server = await asyncio.start_server(
        lambda reader, writer: wire.connect(reader, writer, server_port), "127.0.0.1", port
    )
    wire.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield wire
    finally:
        await wire.close()
        server.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times in the options of a connection."""
    fast = {
        "grpc.keepalive_time_ms": 100,
        "grpc.keepalive_timeout_ms": 300,
        "grpc.http2.ping_timeout_ms": 300,
    }
    assert fast.keys() <= dict(base.OPTIONS).keys()
    monkeypatch.setattr(base, "OPTIONS", tuple((dict(base.OPTIONS) | fast).items()))


def test_pings_go_on_while_nothing_comes(tmp_path: Path, impatient: None) -> None:
    async def main() -> None:
        async with running(tmp_path, seconds=4.2) as server, relay(server.address) as wire:
            async with Looping(wire.address) as client:
                events = await client.events("stream", "x", **GREEDY | {"max_tokens": 1})
                assert isinstance(events[-1], Finish)
            # One a second, which is gRPC's bound. Without max_pings_without_data they end after 3.
            assert wire.pings() >= 4

    asyncio.run(main())


def test_a_silent_connection_is_noticed(tmp_path: Path, impatient: None) -> None:
    async def main() -> None:
        async with running(tmp_path, seconds=0.02) as server, relay(server.address) as wire:
            async with Looping(wire.address, retries=0) as client:
                call = asyncio.create_task(
                    client.events("stream", "x", **GREEDY | {"max_tokens": 400})
                )
                await asyncio.sleep(0.1)
                wire.cut = True
                began = time.monotonic()
                with pytest.raises(CallError, match="ping timeout") as caught:
                    await call
                assert caught.value.code == "UNAVAILABLE" and time.monotonic() - began < 2
            await wire.close()
            await server.at_rest()

    asyncio.run(main())


@both
def test_wait_ready(tmp_path: Path, kind: type) -> None:
    async def main() -> None:
        async with (
            running(tmp_path, opened=False) as server,
            opened(kind, server.address) as client,
        ):
            with pytest.raises(CallError, match=r"not ready within 0.2 s: NOT_SERVING") as caught:
                await client.wait_ready(0.2)
            assert caught.value.code == "DEADLINE_EXCEEDED"
            waiting = asyncio.create_task(client.wait_ready(5))
            await asyncio.sleep(0.15)
            server.open()
            await waiting
            assert (await client.generate("x", **GREEDY)).usage.completion_tokens == 8

    asyncio.run(main())


@both
def test_wait_ready_for_a_server_that_is_not_there_yet(tmp_path: Path, kind: type) -> None:
    async def main() -> None:
        listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        listener.close()
        await listener.wait_closed()
        async with opened(kind, f"127.0.0.1:{port}") as client:
            with pytest.raises(CallError, match="refused"):
                await client.wait_ready(0.3)
            async with running(tmp_path) as server, relay(server.address, port):
                began = time.monotonic()
                await client.wait_ready(5)
                assert time.monotonic() - began < 2

    asyncio.run(main())


@both
def test_wait_ready_does_not_wait_for_what_is_no_such_server(kind: type) -> None:
    async def main() -> None:
        with serving() as port:  # without health
            async with opened(kind, f"127.0.0.1:{port}") as client:
                with pytest.raises(CallError) as caught:
                    await client.wait_ready(5)
                assert caught.value.code == "UNIMPLEMENTED"

    asyncio.run(main())


def signed(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate that signs itself, and its key."""
    certificate = folder / f"{name}.pem"
    key = folder / f"{name}.key"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(
        ["openssl", "req", "-x509", *curve, *subject, *files], check=True, capture_output=True
    )
    return certificate, key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program")
@both
def test_tls(tmp_path: Path, kind: type) -> None:
    server, server_key = signed(tmp_path, "server")
    own, own_key = signed(tmp_path, "client")
    pair = [(server_key.read_bytes(), server.read_bytes())]

    async def answers(port: int, tls: TLS | None) -> bool:
        async with opened(kind, f"127.0.0.1:{port}", tls=tls, retries=0, token="secret") as client:
            try:
                return bool((await client.generate("1")).choices)
            except CallError as error:
                assert error.code == "UNAVAILABLE"
                return False

    async def main() -> None:
        with serving(grpc.ssl_server_credentials(pair)) as port:
            assert await answers(port, TLS(ca=server))
            assert not await answers(port, TLS(ca=own)) and not await answers(port, None)
        with serving(grpc.ssl_server_credentials(pair, own.read_bytes(), True)) as port:
            assert await answers(port, TLS(ca=server, certificate=own, key=own_key))
            assert not await answers(port, TLS(ca=server))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"tls": TLS(certificate="a.pem")}, "key"),
        ({"tls": TLS(key="a.pem")}, "certificate"),
        ({"tls": TLS(ca="/does/not/exist")}, "/does/not/exist"),
        ({"token": ""}, "token"),
        ({"token": "two\nlines"}, "token"),
    ],
)
def test_invalid_client_options(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Client("127.0.0.1:1", **given)


def test_a_client_works_in_a_second_event_loop() -> None:
    """Nothing of the first loop's connections is left in the second."""

    async def main() -> None:
        async with Looping("127.0.0.1:1", retries=0) as client:
            with pytest.raises(CallError):
                await client.loads()

    for _ in range(2):
        asyncio.run(main())
