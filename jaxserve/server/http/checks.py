"""Checks of a request's head, which precede every route."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.addresses import ANY_HOST
from jaxserve.errors import JaxserveError
from jaxserve.server.http.connection import HEALTH
from jaxserve.server.http.errors import HostError, MessageError, error_response
from jaxserve.server.http.page import is_page
from jaxserve.server.security.auth import BearerTokens, token_of


@dataclass(frozen=True)
class Callers:
    """Names and pages by which browsers may call a server."""

    hosts: Set[str] = frozenset()  # names as in HostCheck
    origins: Sequence[str] = ()  # of pages of other sites; ANY_HOST allows all


class Check:
    """Answers a request with the error that `check` raises, or passes it on."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http":
            try:
                self.check(scope, Headers(scope=scope))
            except JaxserveError as error:
                answer = error_response(error)
        await answer(scope, receive, send)

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raise a JaxserveError for a request that is refused."""
        raise NotImplementedError


class OneMeaning(Check):
    """Refuses heads that the parser lets pass, and that a proxy may understand in another way."""

    def check(self, scope: Scope, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) > 1 or (not hosts and scope["http_version"] != "1.0"):
            raise MessageError(f"there are {len(hosts)} host headers; send one")
        encodings = headers.getlist("transfer-encoding")
        if encodings and encodings[0].lower() != "chunked":
            raise MessageError(
                f"the transfer-encoding is {encodings[0]!r:.80}; only chunked is read"
            )


class HostCheck(Check):
    """Refuses names of this server that it does not have.

    A page of another site can make its own name lead to 127.0.0.1 (DNS rebinding), whereupon the
    browser lets it read what it is answered here. It cannot send another Host header than that
    name, and has no token: servers that ask for one need no names.

    Args:
        names: Host names, in small letters, beside localhost and all IP addresses; ANY_HOST allows
            every name.
    """

    def __init__(self, app: ASGIApp, names: Set[str]):
        super().__init__(app)
        self._names = names

    def check(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "localhost")  # none is a client of HTTP/1.0
        if scope["path"] in HEALTH or ANY_HOST in self._names or self._is_here(host):
            return
        raise HostError(
            f"the host is {host!r:.80}; without --token-file only IP addresses, localhost, --host "
            f"and names in --allowed-hosts are served"
        )

    def _is_here(self, host: str) -> bool:
        name = _without_port(host).lower().removesuffix(".")
        return name == "localhost" or name in self._names or _is_address(name)


def _without_port(host: str) -> str:
    if host.startswith("["):  # IPv6
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class TokenCheck(Check):
    """Refuses requests without a valid token, as `authorization: Bearer` or as `x-api-key`.

    Health checks need none, nor does the page, whose files are the same on every server. Other
    requests get `request.state.client`, as in IncomingRequest, and `request.state.token`, which is
    empty where none was given.
    """

    def __init__(self, app: ASGIApp, tokens: BearerTokens):
        super().__init__(app)
        self._tokens = tokens

    def check(self, scope: Scope, headers: Headers) -> None:
        if scope["path"] in HEALTH or is_page(scope["path"]):
            return
        given = _authorizations(headers)
        self._tokens.check(given, admin=False)
        host, port = scope.get("client") or ("", 0)
        client = self._tokens.client_of(given, f"{host}:{port}")
        state = scope.setdefault("state", {})
        state["client"] = client
        state["token"] = token_of(given[0]) if given else ""


def _authorizations(headers: Headers) -> list[str]:
    """Return the authorizations of a request, with keys as Anthropic's clients send them.

    A key that is the token of the authorization is no second one, and an empty key is none: clients
    send both where the variables of their environment say so.
    """
    given = headers.getlist("authorization")
    tokens = [token_of(each) for each in given]
    keys = [key for key in headers.getlist("x-api-key") if key and key not in tokens]
    return [*given, *(f"Bearer {key}" for key in keys)]
