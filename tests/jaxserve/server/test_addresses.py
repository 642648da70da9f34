"""Addresses that a server listens on: names with several, and those of IPv6.

Origin: ggml-org/llama.cpp#5372, on what localhost, ::1 and :: are. Names have all of their
addresses (RFC 6724), and an address of IPv6 is written in brackets before a port (RFC 3986, 3.2.2).
"""

import asyncio
import errno
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.addresses import check_listening_host, joined, without_brackets
from jaxserve.client import AsyncClient
from jaxserve.errors import ConfigError
from jaxserve.server.core.limits import Limits
from jaxserve.server.flags import ServeOptions, parse
from jaxserve.server.http import listening
from jaxserve.server.http.listening import listen
from jaxserve.server.listeners import Listeners
from jaxserve.server.options import AddressOptions
from jaxserve.server.security.auth import BearerTokens
from tests.jaxserve.server.harness import running


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
IPV6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
IPV4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
NOT_HERE = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0))


@pytest.fixture
def localhost(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Addresses of the name localhost, which tests may change."""
    addresses = [IPV6, IPV4]
    resolve = socket.getaddrinfo

    def found(host: Any, port: Any, *rest: Any, **more: Any) -> list[Any]:
        if host != "localhost":
            return resolve(host, port, *rest, **more)
        return [(*kind, (address[0], port, *address[2:])) for *kind, address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return addresses


@pytest.mark.parametrize(
    ("given", "host", "shown"),
    [
        ("[::1]", "::1", "[::1]:80"),
        ("::", "::", "[::]:80"),
        ("localhost", "localhost", "localhost:80"),
        ("[localhost]", "[localhost]", None),
        ("[::1]:80", "[::1]:80", None),
    ],
)
def test_hosts(given: str, host: str, shown: str | None) -> None:
    options = parse(["MODEL", "--host", given])
    assert options.addresses.host == without_brackets(given) == host
    if shown:
        assert joined(host, 80) == shown
    else:
        with pytest.raises(ConfigError, match="it is no name or address without a port"):
            check_listening_host("--host", host)


@needs_ipv6
def test_a_name_with_addresses_of_both_families(localhost: list[Any]) -> None:
    six, four = listen("localhost", 0)
    port = four.getsockname()[1]
    assert six.getsockname()[:2] == ("::1", port)
    for listener in (six, four):
        listener.close()
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        problem = rf"--http-port is {taken}; nothing can listen on localhost:{taken}: Address"
        with pytest.raises(ConfigError, match=problem):
            listen("localhost", taken)
        # What was bound before was closed again.
        socket.create_server(("::1", taken), family=socket.AF_INET6).close()


@needs_ipv6
def test_a_port_that_is_free_at_all_addresses(
    localhost: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system chooses one for the first address, and again where another has it taken."""
    bound = listening._bound
    refusals = iter([True, True, False])

    def taken_at_first(family: int, address: Any, alone: bool) -> socket.socket:
        if family == socket.AF_INET and next(refusals):
            raise OSError(errno.EADDRINUSE, "Address already in use")
        return bound(family, address, alone)

    monkeypatch.setattr(listening, "_bound", taken_at_first)
    six, four = listen("localhost", 0)
    assert six.getsockname()[1] == four.getsockname()[1] and next(refusals, None) is None
    for listener in (six, four):
        listener.close()


@needs_ipv6
def test_the_addresses_of_all_hosts_in_both_families(localhost: list[Any]) -> None:
    """Alone, :: is that of IPv4 as well."""
    localhost[:] = [(*IPV6[:4], ("::", 0, 0, 0)), (*IPV4[:4], ("0.0.0.0", 0))]
    both = listen("localhost", 0)
    for listener in both:
        listener.listen()
    port = both[0].getsockname()[1]
    for host in ("::1", "127.0.0.1"):
        socket.create_connection((host, port)).close()
    for listener in both:
        listener.close()
    (one,) = listen("::", 0)
    one.listen()
    socket.create_connection(("127.0.0.1", one.getsockname()[1])).close()
    one.close()


def test_an_address_that_this_machine_does_not_have(localhost: list[Any]) -> None:
    localhost[:] = [NOT_HERE, IPV4]
    (only,) = listen("localhost", 0)
    assert only.getsockname()[0] == "127.0.0.1"
    only.close()
    localhost[:] = [NOT_HERE]
    with pytest.raises(ConfigError, match=r"nothing can listen on localhost:0: "):
        listen("localhost", 0)


async def fake_metrics() -> bytes:
    return b""


async def answers(base: str) -> bool:
    """Return whether an HTTP server answers there; False if it takes no connections."""
    async with httpx.AsyncClient(timeout=60) as client:
        try:
            return (await client.get(f"http://{base}/v1/models")).status_code == 200
        except httpx.ConnectError:
            return False


@needs_ipv6
@pytest.mark.parametrize(
    ("host", "at"), [("localhost", ["[::1]", "127.0.0.1"]), ("::1", ["[::1]"])]
)
def test_a_server(host: str, at: list[str], tmp_path: Path, localhost: list[Any]) -> None:
    """HTTP on all addresses of a name, and on none once it drains; gRPC has its own sockets."""
    options = ServeOptions(addresses=AddressOptions(host=host, port=0, http_port=0))

    async def main() -> None:
        async with running(tmp_path) as server:
            listeners = Listeners(server.readiness, Limits(), BearerTokens(), fake_metrics)
            failures: list[BaseException] = []
            await listeners.start(options, lambda: None, failures.append)
            shown = dict(address.split(" ") for address in listeners.addresses.split(", "))
            assert shown["HTTP"] == joined(host, listeners.ports["HTTP"])
            addresses = [f"{place}:{listeners.ports['HTTP']}" for place in at]
            assert [await answers(address) for address in addresses] == [True] * len(at)
            async with AsyncClient(shown["gRPC"], retries=0, timeout=60) as client:
                assert await client.tokenize("x")
            await listeners.drain()
            assert [await answers(address) for address in addresses] == [False] * len(at)
            await listeners.stop(0)
            assert not failures

    asyncio.run(main())
