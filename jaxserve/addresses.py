"""Addresses HOST:PORT, as flags and files give them."""

import argparse
import ipaddress
import re
import socket
from typing import Any

from jaxserve.flag_errors import flag_error

NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")  # also an IPv4 address

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")
ANY_HOST = "*"  # in a list of names or origins: all of them

# Beginnings of gRPC's names of servers (its document naming.md); gRPC says what is wrong with them.
GRPC_NAMES = tuple("dns: ipv4: ipv6: unix: unix-abstract: vsock: xds: passthrough:".split())


def joined(host: str, port: int) -> str:
    """Return HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def without_brackets(host: str) -> str:
    """Return a host as sockets take it: ::1 of [::1]."""
    is_bracketed = host.startswith("[") and host.endswith("]") and _is_ipv6(host[1:-1])
    return host[1:-1] if is_bracketed else host


def host_names(text: str) -> tuple[str, ...]:
    """Return the names, in small letters, of a list with commas; ANY_HOST is one of them."""
    names = tuple(name.strip().lower() for name in text.split(","))
    for name in names:
        if name != ANY_HOST and not NAME.fullmatch(name):
            raise argparse.ArgumentTypeError(
                f"{name!r} is not the name of a host (names are separated by commas, without ports)"
            )
    return names


def page_origins(text: str) -> tuple[str, ...]:
    """Return the origins, in small letters, of a list with commas; ANY_HOST is one of them.

    An origin is that of a web page (RFC 6454), or of a program that shows pages.
    """
    origins = tuple(origin.strip().lower() for origin in text.split(","))
    for origin in origins:
        if origin not in (ANY_HOST, "null") and not ORIGIN.fullmatch(origin):
            raise argparse.ArgumentTypeError(
                f"{origin!r} is no origin, such as https://chat.example or http://localhost:3000 "
                f"(without a path; separated by commas)"
            )
    return origins


def address_problem(text: str) -> str | None:
    """Return why a text is not HOST:PORT; None if it is.

    HOST is a name, an IPv4 address, or an IPv6 address in brackets. Whether there is such a host is
    not asked: it may come later.
    """
    host, _, port = text.rpartition(":")
    if not (_is_host(host) and port.isascii() and port.isdigit()):
        return "it must be HOST:PORT, like 10.0.0.7:50051 or [fd00::7]:50051"
    # The length first: int() of thousands of digits is slow, and has a limit of its own.
    if len(port) > 5 or not 0 < int(port) < 2**16:
        return "its port must be 1 to 65535"
    return None


def server_problem(text: str) -> str | None:
    """Return why a text is not the address of a gRPC server; None if it is.

    It is HOST:PORT, or another name that gRPC knows: dns:/// before it has all addresses of the
    host asked for.
    """
    return None if text.startswith(GRPC_NAMES) else address_problem(text)


def check_address(flag: str, text: str) -> None:
    """Raise ConfigError unless the value of a flag is HOST:PORT."""
    if problem := address_problem(text):
        raise flag_error(flag, text, problem)


def check_listening_host(flag: str, host: str) -> None:
    """Raise ConfigError unless this machine can listen on a host, the value of a flag."""
    try:
        found = listening_addresses(host, 0)
    except (OSError, UnicodeError) as error:
        problem = f"it is no name or address without a port: {_reason(error)}"
        raise flag_error(flag, host, problem) from None
    problems = [_why_not_here(family, address) for family, address in found]
    if all(problems):
        problem = f"it is no address of this machine: {problems[0]}"
        raise flag_error(flag, host, problem)


def listening_addresses(host: str, port: int) -> list[tuple[int, Any]]:
    """Return family and address of every socket that listens on a host; a name may have several.

    Raises OSError or UnicodeError for what is no name or address.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _why_not_here(family: int, address: Any) -> str | None:
    """Return why no socket can be bound to an address; None if one can."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind(address)
    except OSError as error:
        return _reason(error)
    return None


def _is_host(text: str) -> bool:
    if text.startswith("[") and text.endswith("]"):
        return _is_ipv6(text[1:-1])
    return NAME.fullmatch(text) is not None


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
