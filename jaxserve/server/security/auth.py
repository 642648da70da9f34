"""Who may call: bearer tokens, compared in constant time."""

import hmac
from dataclasses import dataclass

from jaxserve.errors import AdminOnlyError, CredentialError

SCHEME = "bearer "  # in any case (RFC 7235)


@dataclass(frozen=True)
class BearerTokens:
    """Tokens of clients, and of admins, who may do what clients may. None: no such token; without
    both all is open.
    """

    client: str | None = None
    admin: str | None = None

    def check(self, authorization: str | None, admin: bool) -> None:
        """CredentialError without a valid token, AdminOnlyError with a client's where an admin's is
        needed.
        """
        if self.client is None and self.admin is None:
            return
        given = _token(authorization)
        is_client, is_admin = _same(given, self.client), _same(given, self.admin)
        if is_admin or (not admin and (is_client or self.client is None)):
            return
        if admin and is_client:
            raise AdminOnlyError(
                "this needs the admin's token, not a client's (the server's --admin-token-file)"
            )
        raise CredentialError('a valid token is missing (send "authorization: Bearer TOKEN")')


def _same(given: str, token: str | None) -> bool:
    return token is not None and hmac.compare_digest(given.encode(), token.encode())


def _token(authorization: str | None) -> str:
    return (
        authorization[len(SCHEME) :]
        if authorization and authorization[: len(SCHEME)].lower() == SCHEME
        else ""
    )
