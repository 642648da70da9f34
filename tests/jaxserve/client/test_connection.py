"""The channel's options by what they do, TLS, and waiting for a server."""

import asyncio
import itertools
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from jaxserve.client import TLS, CallError, Client, Finish, retrying
from jaxserve.client import connection as base
from jaxserve.errors import ConfigError
from jaxserve.v1 import common_pb2, inference_pb2_grpc
from jaxserve.v1 import inference_pb2 as pb
from tests.jaxserve.client.test_client import GREEDY, Looping, both, opened
from tests.jaxserve.server.harness import running, until

PREFACE = len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
PING = 6
ACK = 1
HOUR = 3_600_000  # milliseconds


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
def client_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Looping]:
    """Return a maker of clients that ping often, and wait this many milliseconds for an answer."""
    options = dict(base.OPTIONS)

    def make(address: str, milliseconds: int) -> Looping:
        times = {
            "grpc.keepalive_time_ms": 100,
            "grpc.keepalive_timeout_ms": milliseconds,
            "grpc.http2.ping_timeout_ms": milliseconds,
        }
        assert times.keys() <= options.keys()
        monkeypatch.setattr(base, "OPTIONS", tuple((options | times).items()))
        return Looping(address, retries=0)

    return make


@pytest.mark.system
def test_pings_go_on_while_nothing_comes(
    tmp_path: Path, client_of: Callable[[str, int], Looping]
) -> None:
    async def main() -> None:
        async with (
            running(tmp_path) as server,
            relay(server.address) as wire,
            client_of(wire.address, HOUR) as client,
        ):
            with server.holding():
                call = asyncio.create_task(client.events("stream", "x", **GREEDY))
                # Without max_pings_without_data they end after 3.
                await until(lambda: wire.pings() >= 4)
            assert isinstance((await call)[-1], Finish)

    asyncio.run(main())


@pytest.mark.system
def test_a_silent_connection_is_noticed(
    tmp_path: Path, client_of: Callable[[str, int], Looping]
) -> None:
    """In the time of the options: another client, which has longer times, does not notice it."""

    async def main() -> None:
        async with (
            running(tmp_path, seconds=0.02) as server,
            relay(server.address) as wire,
            client_of(wire.address, 300) as client,
            client_of(wire.address, HOUR) as other,
        ):
            long = GREEDY | {"max_tokens": 400}
            calls = [
                asyncio.create_task(each.events("stream", "x", **long)) for each in (client, other)
            ]
            # On a machine that stalls, the first is noticed before the cut.
            await until(lambda: server.service.loads.running == 2 or calls[0].done())
            wire.cut = True
            with pytest.raises(CallError, match="ping timeout") as caught:
                await calls[0]
            assert caught.value.code == "UNAVAILABLE"
            await asyncio.sleep(1.0)
            assert not calls[1].done()
            calls[1].cancel()
            await wire.close()
            await server.at_rest()

    asyncio.run(main())


@contextmanager
def passing(seconds: float) -> Iterator[None]:
    """Let so much time pass for a client between every two looks at the clock."""
    clock = SimpleNamespace(monotonic=itertools.count(step=seconds).__next__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrying, "time", clock)
        yield


@pytest.mark.system
@both
def test_wait_ready(tmp_path: Path, kind: type) -> None:
    async def main() -> None:
        async with (
            running(tmp_path, opened=False) as server,
            opened(kind, server.address) as client,
        ):
            with passing(1000.0), pytest.raises(CallError, match=r"3600 s: NOT_SERVING") as caught:
                await client.wait_ready(3600)
            assert caught.value.code == "DEADLINE_EXCEEDED"
            waiting = asyncio.create_task(client.wait_ready(60))
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
            with passing(1000.0), pytest.raises(CallError, match="refused"):
                await client.wait_ready(3600)
            async with running(tmp_path) as server, relay(server.address, port):
                await client.wait_ready(60)

    asyncio.run(main())


@both
def test_wait_ready_does_not_wait_for_what_is_no_such_server(kind: type) -> None:
    async def main() -> None:
        with serving() as port:  # without health
            async with opened(kind, f"127.0.0.1:{port}") as client:
                with pytest.raises(CallError) as caught:
                    await client.wait_ready(60)
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


@pytest.mark.system
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
