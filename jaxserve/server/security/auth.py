"""Bearer tokens, compared in constant time."""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.errors import AdminOnlyError, CredentialError

SCHEME = "bearer"  # in lower case; clients may write it in any case (RFC 7235)


@dataclass(frozen=True)
class BearerTokens:
    """The tokens that callers must send. Without either of them every call is allowed."""

    clients: tuple[str, ...] = ()  # tokens of clients, any of them; none: clients need none
    # Token of administrators, who may also do what clients may; None: AdminService is closed
    # wherever clients need a token.
    admin: str | None = None

    def check(self, authorization: Sequence[str], admin: bool) -> None:
        """Check the authorization headers of a call; `admin` says whether AdminService is called.

        Raises CredentialError without a valid token, or with several headers, of which a proxy may
        have checked another one; AdminOnlyError for a client's token where an administrator's is
        needed.
        """
        if not self.clients and self.admin is None:
            return
        if len(authorization) > 1:
            raise CredentialError(
                f"there are {len(authorization)} authorization headers (or x-api-key); send one"
            )
        given = token_of(authorization[0] if authorization else "")
        # All are compared in any case, so that the time does not say which one matched.
        is_client = self._number_of(given) > 0
        is_admin = _same(given, self.admin)
        if is_admin:
            return
        if not admin and (is_client or not self.clients):
            return
        if admin and is_client:
            raise AdminOnlyError(
                "this needs the admin's token, not a client's (the server's --admin-token-file)"
            )
        raise CredentialError('a valid token is missing (send "authorization: Bearer TOKEN")')

    def client_of(self, authorization: Sequence[str], connection: str) -> str:
        """Return who sends a call that `check` let pass, for sharing rows between clients.

        A client is whoever has a token where there are several. One token tells nobody apart: then
        each connection is a client.

        Args:
            connection: Address of the connection's other end.
        """
        if len(self.clients) < 2:
            return connection
        number = self._number_of(token_of(authorization[0] if authorization else ""))
        return f"token {number}" if number else "admin"

    def _number_of(self, given: str) -> int:
        """Return which of the clients' tokens was given, counted from 1; 0 if none."""
        matches = [_same(given, token) for token in self.clients]
        return matches.index(True) + 1 if any(matches) else 0


def _same(given: str, token: str | None) -> bool:
    return token is not None and hmac.compare_digest(given.encode(), token.encode())


def token_of(authorization: str) -> str:
    """Return the token of an authorization header; "" for another scheme or no header."""
    scheme, _, token = authorization.partition(" ")
    return token if scheme.lower() == SCHEME else ""
