"""The chain of orders: none can be left out, repeated, reordered, changed, or come from somebody
else.
"""

import hmac
from hashlib import sha256

from jaxserve.errors import EngineError

SECRET_BYTES = 32


class Chain:
    """Both ends of a stream of orders keep one, and their digests stay equal as long as their
    orders do.

    secret: of this pod; HMAC-SHA256 under it, over the digest before and the order.
    """

    def __init__(self, secret: bytes):
        self._secret = secret
        self._digest = sha256(secret).digest()
        self._number = 0

    def add(self, order: bytes) -> tuple[int, bytes]:
        """The order's number, from 1 on, and its digest."""
        self._number += 1
        self._digest = hmac.digest(self._secret, self._digest + order, "sha256")
        return self._number, self._digest

    def check(self, number: int, order: bytes, digest: bytes) -> None:
        """EngineError unless this is the order that the other end added next."""
        expected, own = self.add(order)
        if number != expected:
            raise EngineError(f"order {number} came where {expected} had to")
        if not hmac.compare_digest(own, digest):
            raise EngineError(
                f"order {number} is not the one that the leader sent (its digest differs)"
            )


def proof_of(secret: bytes, host: int) -> bytes:
    """What a host shows to be let in."""
    return hmac.digest(secret, b"host %d" % host, "sha256")
