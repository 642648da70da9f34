"""Bearer tokens, compared in constant time."""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.errors import AdminOnlyError, CredentialError

SCHEME = "bearer"  # in lower case; clients may write it in any case (RFC 7235)


@dataclass(frozen=True)
class BearerTokens:
    """The tokens that callers must send. Without either of them every call is allowed."""

    client: str | None = None  # token of clients; None: clients need none
    # Token of administrators, who may also do what clients may; None: AdminService is closed
    # wherever clients need a token.
    admin: str | None = None

    def check(self, authorization: Sequence[str], admin: bool) -> None:
        """Check the authorization headers of a call; `admin` says whether AdminService is called.

        Raises CredentialError without a valid token, or with several headers, of which a proxy may
        have checked another one; AdminOnlyError for a client's token where an administrator's is
        needed.
        """
        if self.client is None and self.admin is None:
            return
        if len(authorization) > 1:
            raise CredentialError(f"there are {len(authorization)} authorization headers; send one")
        given = token_of(authorization[0] if authorization else "")
        # Both are compared in any case, so that the time does not say which one matched.
        is_client = _same(given, self.client)
        is_admin = _same(given, self.admin)
        if is_admin:
            return
        if not admin and (is_client or self.client is None):
            return
        if admin and is_client:
            raise AdminOnlyError(
                "this needs the admin's token, not a client's (the server's --admin-token-file)"
            )
        raise CredentialError('a valid token is missing (send "authorization: Bearer TOKEN")')


def _same(given: str, token: str | None) -> bool:
    return token is not None and hmac.compare_digest(given.encode(), token.encode())


def token_of(authorization: str) -> str:
    """Return the token of an authorization header; "" for another scheme or no header."""
    scheme, _, token = authorization.partition(" ")
    return token if scheme.lower() == SCHEME else ""
