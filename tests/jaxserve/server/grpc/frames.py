"""Frames of HTTP/2 (RFC 9113), from a client that keeps no rules but its own."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.jaxserve.server.harness import Running, until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA = 0
HEADERS = 1
PRIORITY = 2
RST_STREAM = 3
SETTINGS = 4
PING = 6
WINDOW_UPDATE = 8
CONTINUATION = 9
END_STREAM = 1
ACK = 1  # of SETTINGS and PING
END_HEADERS = 4
INITIAL_WINDOW_SIZE = 4  # of SETTINGS
REFUSED_STREAM = (7).to_bytes(4)  # of RST_STREAM
CANCEL = (8).to_bytes(4)
LAST = b"the last"  # of the PING that says whether the server is still there


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame of HTTP/2 (RFC 9113, 4.1)."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header without compression (RFC 7541, 6.2.2)."""
    return b"\x00" + integer(len(name)) + name + integer(len(value)) + value


def integer(value: int) -> bytes:
    """Return a length in HPACK's form, with a prefix of seven bits (RFC 7541, 5.1)."""
    if value < 127:
        return bytes([value])
    rest = value - 127
    parts = [127]
    while rest >= 128:
        parts.append(rest % 128 + 128)
        rest //= 128
    return bytes([*parts, rest])


def headers_of(method: str, *more: tuple[bytes, bytes]) -> bytes:
    """Return the headers of a call of gRPC, as one block."""
    headers = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", method.encode()),
        (b":authority", b"x"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *more,
    ]
    return b"".join(literal(*header) for header in headers)


def opened(stream: int, method: str) -> bytes:
    """Return the frame that begins a call, whose message is yet to come."""
    return frame(HEADERS, END_HEADERS, stream, headers_of(method))


def message(stream: int, data: bytes) -> bytes:
    """Return the frame with the only message of a call."""
    return frame(DATA, END_STREAM, stream, b"\x00" + len(data).to_bytes(4) + data)


def setting(name: int, value: int) -> bytes:
    """Return the frame that tells the server one setting of the client."""
    return frame(SETTINGS, 0, 0, name.to_bytes(2) + value.to_bytes(4))


class Frame(NamedTuple):
    """A frame from the server."""

    kind: int
    flags: int
    stream: int
    payload: bytes


@dataclass
class RawConnection:
    """A connection whose frames the test writes itself; what comes back is read at once."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    received: bytearray = field(default_factory=bytearray)
    hung_up: bool = False  # the server has closed the connection

    async def read(self) -> None:
        """Read until the server hangs up."""
        with suppress(ConnectionError):
            while part := await self.reader.read(2**16):
                self.received += part
        self.hung_up = True

    async def send(self, data: bytes) -> None:
        """Write, and let others run; ConnectionError once the server has hung up."""
        self.writer.write(data)
        await self.writer.drain()
        await asyncio.sleep(0)

    async def settle(self) -> None:
        """Wait until the server has worked off what was sent, or has hung up."""
        with suppress(ConnectionError):
            await self.send(frame(PING, 0, 0, LAST))
        await until(lambda: self.hung_up or frame(PING, ACK, 0, LAST) in self.received)

    def frames(self) -> Iterator[Frame]:
        """Yield the whole frames that have come back so far."""
        data = bytes(self.received)
        start = 0
        while (begin := start + 9) <= len(data):
            end = begin + int.from_bytes(data[start : start + 3])
            if end > len(data):
                return
            kind, flags = data[start + 3 : start + 5]
            yield Frame(kind, flags, int.from_bytes(data[start + 5 : begin]), data[begin:end])
            start = end


@asynccontextmanager
async def connected(server: Running, *settings: bytes) -> AsyncIterator[RawConnection]:
    """Connect, with the settings that the client tells; the connection is cut at the end."""
    host, port = server.address.split(":")
    connection = RawConnection(*await asyncio.open_connection(host, int(port)))
    reading = asyncio.create_task(connection.read())
    try:
        hello = settings or (frame(SETTINGS, 0, 0),)
        with suppress(ConnectionError):  # a server that is full hangs up at once
            await connection.send(PREFACE + b"".join(hello) + frame(SETTINGS, ACK, 0))
        yield connection
    finally:
        connection.writer.transport.abort()
        await reading
