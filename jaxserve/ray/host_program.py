"""Arguments of a jaxserve program for each host of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.errors import ConfigError

SERVE = "serve"
GROUPS_OWN = ("--hosts", "--host-index", "--coordinator", "--pod")
WHERE_IT_LISTENS = ("--host", "--no-http")  # the group has to reach the server
TLS = ("--tls-cert", "--tls-key", "--tls-client-ca")


@dataclass(frozen=True)
class HostProgram:
    """A program that is started on every host of an engine.

    Attributes:
        arguments: What stands behind `jaxserve` in a shell, without what differs by host.

    Raises:
        ConfigError: An argument is for the group of hosts to say, or the group cannot ask the
            server with it.
    """

    arguments: tuple[str, ...]

    def __post_init__(self) -> None:
        for flag in (*GROUPS_OWN, *(WHERE_IT_LISTENS if self.serves else ())):
            if self._gives(flag):
                raise ConfigError(f"{flag} is for the group of hosts to say; leave it out")
        for flag in TLS:
            if self.serves and self._gives(flag):
                raise ConfigError(
                    f"{flag}: the group of hosts asks its server over plain HTTP; leave it out, "
                    f"and let a proxy have the certificate"
                )

        if self.serves and self._value("--http-port") == "0":
            raise ConfigError("--http-port is 0; leave it out, which takes a free port")

    @property
    def serves(self) -> bool:
        """Return whether the program is a server, which is ready at some time."""
        return self.arguments[:1] == (SERVE,)

    @property
    def wants_token(self) -> bool:
        """Return whether a server is to have a token that its arguments do not give."""
        return self.serves and not self._gives("--token-file")

    def http_port(self, free: int) -> int:
        """Return the port of HTTP: what the arguments give, else the free one."""
        given = self._value("--http-port")
        return int(given) if given else free

    def of_host(self, number: int, addresses: Sequence[str], free: Sequence[int]) -> list[str]:
        """Return the arguments of one host.

        Args:
            number: Number of the host.
            addresses: Addresses of all hosts.
            free: Three ports that nothing listens on at host 0.
        """
        arguments = list(self.arguments)
        coordinator, grpc, http = free
        if len(addresses) > 1:
            arguments += ["--hosts", str(len(addresses)), "--host-index", str(number)]
            arguments += ["--coordinator", f"{_in_url(addresses[0])}:{coordinator}"]
        if self.serves:
            # Two groups may share a host, so that no port can be the usual one.
            arguments += ["--host", addresses[number]]
            if not self._gives("--port"):
                arguments += ["--port", str(grpc if number == 0 else 0)]
            if not self._gives("--http-port"):
                arguments += ["--http-port", str(http)]
        return arguments

    def url(self, address: str, free: int) -> str:
        """Return the address of the server on host 0."""
        return f"http://{_in_url(address)}:{self.http_port(free)}"

    def _gives(self, flag: str) -> bool:
        return any(each == flag or each.startswith(f"{flag}=") for each in self.arguments)

    def _value(self, flag: str) -> str | None:
        for each, following in zip(self.arguments, (*self.arguments[1:], ""), strict=True):
            if each == flag:
                return following
            if each.startswith(f"{flag}="):
                return each.partition("=")[2]
        return None


def _in_url(address: str) -> str:
    """Return an IP address as it stands before a port."""
    return f"[{address}]" if ":" in address else address
