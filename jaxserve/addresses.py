"""Addresses HOST:PORT, as flags and files give them."""

import ipaddress
import re
import socket

from jaxserve.errors import ConfigError, flag_text

NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")  # also an IPv4 address


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

    It is HOST:PORT, and dns:/// before it has gRPC ask for all addresses of the name.
    """
    return address_problem(text.removeprefix("dns:///"))


def check_address(flag: str, text: str) -> None:
    """Raise ConfigError unless the value of a flag is HOST:PORT."""
    if problem := address_problem(text):
        raise ConfigError(flag_text(flag, text, problem))


def check_listening_host(flag: str, host: str) -> None:
    """Raise ConfigError unless this machine can listen on a host, the value of a flag."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        problem = f"it is no name or address without a port: {_reason(error)}"
        raise ConfigError(flag_text(flag, host, problem)) from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as trial:
        try:
            trial.bind(address)
        except OSError as error:
            problem = f"it is no address of this machine: {_reason(error)}"
            raise ConfigError(flag_text(flag, host, problem)) from None


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
