"""The sockets that an HTTP server listens on, and their end."""

import contextlib
import ctypes
import errno
import select
import socket
import struct
import sys
from typing import Any

from jaxserve.addresses import joined, listening_addresses
from jaxserve.flag_errors import flag_error

UNSENT = 64 * 1024  # bytes of an answer that wait in the kernel for the client to read
TRIES = 20  # of ports that the system chooses, until one is free at all addresses
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)

SO_ATTACH_FILTER = 26  # asm-generic/socket.h; Python's module has no name for it
# Classic BPF, run by the kernel on each TCP segment: Documentation/networking/filter.rst.
DROP_SYN = (
    (0x30, 0, 0, 13),  # load the byte of the header that has the flags
    (0x45, 0, 1, 0x02),  # is SYN set? otherwise skip one instruction
    (0x06, 0, 0, 0),  # drop the segment
    (0x06, 0, 0, 0xFFFFFFFF),  # keep all of it
)


def listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets that are bound to all addresses of a host, with one port.

    The port is chosen by the system where `port` is 0. An address that this machine does not have,
    such as that of IPv6 where it is switched off, is passed over if there is another. Raises
    ConfigError if there is none, or the port is taken at any of them.
    """
    tries = TRIES if port == 0 else 1
    while True:
        try:
            return _all_bound(listening_addresses(host, port))
        except OSError as error:
            tries -= 1
            if tries == 0 or error.errno != errno.EADDRINUSE:
                problem = f"nothing can listen on {joined(host, port)}: {error.strerror}"
                raise flag_error("--http-port", port, problem) from None


def _all_bound(addresses: list[tuple[int, Any]]) -> list[socket.socket]:
    """Return sockets that are bound to addresses; a port of 0 becomes one that all of them have."""
    bound = list[socket.socket]()
    missing: OSError | None = None
    with contextlib.ExitStack() as opened:
        for family, (host, port, *scope) in addresses:
            chosen = bound[0].getsockname()[1] if bound else port
            try:
                listener = _bound(family, (host, chosen, *scope), alone=len(addresses) == 1)
                bound.append(opened.enter_context(listener))
            except OSError as error:
                if error.errno not in NOT_HERE:
                    raise
                missing = error
        if missing and not bound:
            raise missing
        opened.pop_all()
    return bound


def _bound(family: int, address: Any, alone: bool) -> socket.socket:
    """Return a bound socket; if it is `alone`, one of IPv6 takes connections over IPv4 as well."""
    # asyncio sets TCP_NODELAY only on sockets whose protocol is given as TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it. Without it the kernel takes megabytes, and asks for more only when a
    # third of them is free: a slow reader could not be told from one that reads nothing.
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not alone)
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def has_waiting(listener: socket.socket) -> bool:
    """Return whether a connection waits to be accepted."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    return bool(poll.poll(0))


def begin_no_more(listener: socket.socket) -> None:
    """Let no further connection begin; those that have begun can still be accepted.

    To close a listening socket is to reset the connections that wait in its queue, with the
    requests on them, and between the last accept and the close there is always time for one more.
    So the kernel is told to drop every SYN first. A client that is not answered sends another one
    after a second; the socket is closed then, and the connection refused.

    Without effect outside of Linux, and where a sandbox knows no filters.
    """
    if sys.platform != "linux":
        return
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in DROP_SYN)
    memory = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(DROP_SYN), ctypes.addressof(memory))
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
