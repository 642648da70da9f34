"""Authenticate a stream of orders: none can be left out, repeated, reordered, changed or forged."""

import hmac
from hashlib import sha256

from jaxserve.errors import EngineError

SECRET_BYTES = 32


class MessageChain:
    """Digests of a stream of orders; each end keeps one, and they stay equal as the orders do.

    A digest is HMAC-SHA256, under the pod's secret, of the digest before and the order.
    """

    def __init__(self, secret: bytes):
        self._secret = secret
        self._digest = sha256(secret).digest()
        self._number = 0

    def add(self, order: bytes) -> tuple[int, bytes]:
        """Append an order; return its number, from 1 on, and its digest."""
        self._number += 1
        self._digest = hmac.digest(self._secret, self._digest + order, "sha256")
        return self._number, self._digest

    def check(self, number: int, order: bytes, digest: bytes) -> None:
        """Append an order; EngineError unless the other end appended the same one next."""
        expected, own = self.add(order)
        if number != expected:
            raise EngineError(f"order {number} came where {expected} had to")
        if not hmac.compare_digest(own, digest):
            raise EngineError(
                f"order {number} is not the one that the leader sent (its digest differs)"
            )


def proof_of(secret: bytes, host: int) -> bytes:
    """Return what a host shows the leader to be let in."""
    return hmac.digest(secret, b"host %d" % host, "sha256")
