"""The socket that an HTTP server listens on, and its end."""

import contextlib
import ctypes
import select
import socket
import struct
import sys

from jaxserve.errors import ConfigError, flag_text

SO_ATTACH_FILTER = 26  # asm-generic/socket.h; Python's module has no name for it
# Classic BPF, run by the kernel on each TCP segment: Documentation/networking/filter.rst.
DROP_SYN = (
    (0x30, 0, 0, 13),  # load the byte of the header that has the flags
    (0x45, 0, 1, 0x02),  # is SYN set? otherwise skip one instruction
    (0x06, 0, 0, 0),  # drop the segment
    (0x06, 0, 0, 0xFFFFFFFF),  # keep all of it
)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address; ConfigError if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets whose protocol is given as TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            flag_text("--http-port", port, f"nothing can listen on {host}:{port}: {error.strerror}")
        ) from None
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
