"""Certificates on every address that the server listens on."""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.client import TLS, AsyncClient, CallError
from jaxserve.errors import ConfigError
from jaxserve.server.core.limits import Limits
from jaxserve.server.flags import ServeOptions
from jaxserve.server.grpc.server import ADMIN, INFERENCE
from jaxserve.server.grpc.vllm import NAME as VLLM
from jaxserve.server.listeners import Listeners
from jaxserve.server.options import AddressOptions, CredentialOptions
from jaxserve.server.security.auth import BearerTokens
from jaxserve.server.security.tls import Tls
from tests.jaxserve.client.test_connection import signed
from tests.jaxserve.server.harness import Running, running
from tests.jaxserve.server.http.harness import fake_metrics

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program"),
]


@asynccontextmanager
async def listening(
    server: Running, token: str | None = None, **files: Path
) -> AsyncIterator[dict[str, str]]:
    """Listen once more for the service, with this token and certificates; yield the addresses."""
    addresses = AddressOptions(port=0, admin_port=0, vllm_port=0, http_port=0)
    options = ServeOptions(addresses=addresses, credentials=CredentialOptions(**files))
    tokens = BearerTokens((token,) if token else (), token)
    listeners = Listeners(server.readiness, Limits(), tokens, fake_metrics)
    ended: list[BaseException] = []
    await listeners.start(options, lambda: None, ended.append)
    try:
        yield dict(address.split(" ") for address in listeners.addresses.split(", "))
    finally:
        await listeners.stop(0)
        assert not ended


async def grpc_answers(address: str, tls: TLS | None, admin: bool = False) -> bool:
    async with AsyncClient(address, tls=tls, retries=0, timeout=60) as client:
        try:
            return bool(await (client.model_info() if admin else client.tokenize("x")))
        except CallError as error:
            assert error.code in ("UNAVAILABLE", "UNIMPLEMENTED")
            return False


async def services(address: str, ca: Path) -> list[str]:
    """Return the names that the health service knows."""
    credentials = grpc.ssl_channel_credentials(ca.read_bytes())
    async with aio.secure_channel(address, credentials) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        found = []
        for name in (INFERENCE, ADMIN, VLLM):
            with contextlib.suppress(aio.AioRpcError):
                await stub.Check(health_pb2.HealthCheckRequest(service=name))
                found.append(name)
        return found


async def http_answers(address: str, context: ssl.SSLContext) -> bool:
    async with httpx.AsyncClient(verify=context, timeout=60) as http:
        try:
            return (await http.get(f"https://{address}/health")).status_code == 200
        except (httpx.ConnectError, httpx.ReadError):
            return False


def trusting(ca: Path, *pair: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca))
    if pair:
        context.load_cert_chain(*map(str, pair))
    return context


def test_tls_and_mutual_tls(tmp_path: Path) -> None:
    (cert, key), (own, own_key) = signed(tmp_path, "server"), signed(tmp_path, "client")

    async def main() -> None:
        async with running(tmp_path) as server:
            async with listening(server, tls_cert=cert, tls_key=key) as found:
                assert await grpc_answers(found["gRPC"], TLS(ca=cert))
                assert not await grpc_answers(found["gRPC"], None)
                assert await grpc_answers(found["admin"], TLS(ca=cert), admin=True)
                assert not await grpc_answers(
                    found["gRPC"], TLS(ca=cert), admin=True
                )  # it is on the other port only
                assert await services(found["gRPC"], cert) == [INFERENCE]
                assert await services(found["admin"], cert) == [ADMIN]
                assert await services(found["vLLM"], cert) == [VLLM]
                assert await http_answers(found["HTTP"], trusting(cert))
                assert not await http_answers(found["HTTP"], trusting(own))
            async with listening(server, tls_cert=cert, tls_key=key, tls_client_ca=own) as found:
                assert await grpc_answers(found["gRPC"], TLS(ca=cert, certificate=own, key=own_key))
                assert not await grpc_answers(found["gRPC"], TLS(ca=cert))
                assert await http_answers(found["HTTP"], trusting(cert, own, own_key))
                assert not await http_answers(found["HTTP"], trusting(cert))

    asyncio.run(main())


def locked(key: Path) -> Path:
    """Return a copy of a key under a password."""
    copy = key.with_suffix(".locked")
    options = ["-aes256", "-passout", "pass:secret"]
    subprocess.run(
        ["openssl", "pkey", *options, "-in", str(key), "-out", str(copy)],
        check=True,
        capture_output=True,
    )
    return copy


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    (cert, key), (other, _) = signed(tmp_path, "one"), signed(tmp_path, "two")
    assert Tls.of(None, None, None) is None and Tls.of(cert, key, other)
    for files, message in (
        ((cert, None, None), "go together"),
        ((None, None, other), "go together"),
        ((tmp_path / "none.pem", key, None), "No such file"),
        ((other, key, None), "it is not the key of the certificate in"),
        ((key, key, None), "--tls-cert is .*it holds no certificate in PEM"),
        ((cert, cert, None), "--tls-key is .*it holds no private key in PEM"),
        ((cert, key, key), "--tls-client-ca is .*it holds no certificate in PEM"),
        ((cert, locked(key), None), "--tls-key is .*the key is encrypted"),
    ):
        with pytest.raises(ConfigError, match=message):
            Tls.of(*files)
