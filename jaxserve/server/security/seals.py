"""Seals of texts that clients keep for this server: encrypted, or signed."""

import binascii
import hmac
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from jaxserve.errors import JaxserveError
from jaxserve.flag_errors import flag_error
from jaxserve.server.security.files import read_file

FLAG = "--state-key-file"
KEY_BYTES = 32
NAME_BYTES = 8  # of a key, in what it sealed
NONCE_BYTES = 12  # as AES-GCM has it (NIST SP 800-38D, 8.2.2)


class SealError(JaxserveError):
    """A text that a client gave back was not sealed by this server's key, or was changed.

    The text is a clause that begins with a verb.

    Attributes:
        other_key: Whether it was not made with this key: by this server before it restarted, or
            by another provider.
    """

    def __init__(self, problem: str, other_key: bool = False):
        super().__init__(problem)
        self.other_key = other_key


class Seals:
    """Seals made with one secret key.

    Args:
        secret: Bytes that only servers know which shall open each other's seals; None for seals
            that end with the process.
    """

    def __init__(self, secret: bytes | None = None):
        secret = secret or secrets.token_bytes(KEY_BYTES)
        self._name = _derived(secret, "name")[:NAME_BYTES]
        self._signing = _derived(secret, "sign")
        self._cipher = AESGCM(_derived(secret, "encrypt"))

    def seal(self, text: str) -> str:
        """Return the text encrypted, in letters, digits, dashes and underscores."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        encrypted = self._cipher.encrypt(nonce, text.encode("utf-8", "surrogatepass"), self._name)
        return _written(self._name + nonce + encrypted)

    def open(self, sealed: str) -> str:
        """Return the text that was sealed; SealError for anything else."""
        given = self._of_this_key(sealed)
        nonce = given[:NONCE_BYTES]
        encrypted = given[NONCE_BYTES:]
        try:
            text = self._cipher.decrypt(nonce, encrypted, self._name)
        except (InvalidTag, ValueError):
            raise SealError("was changed since it was sealed") from None
        return text.decode("utf-8", "surrogatepass")

    def sign(self, text: str) -> str:
        """Return a signature of the text."""
        return _written(self._name + self._digest(text))

    def check(self, text: str, signature: str) -> None:
        """Raise SealError unless the signature is one of this text."""
        if not hmac.compare_digest(self._of_this_key(signature), self._digest(text)):
            raise SealError("is not a signature of this text")

    def _digest(self, text: str) -> bytes:
        return hmac.digest(self._signing, text.encode("utf-8", "surrogatepass"), "sha256")

    def _of_this_key(self, written: str) -> bytes:
        """Return what stands behind the name of the key; SealError for the name of another."""
        try:
            given = urlsafe_b64decode(written.encode("ascii"))
        except (ValueError, binascii.Error):
            given = b""
        if len(given) <= NAME_BYTES:
            raise SealError("is nothing that a server of this kind makes", other_key=True)
        if given[:NAME_BYTES] != self._name:
            problem = f"was made with another key, or before the server restarted ({FLAG} keeps it)"
            raise SealError(problem, other_key=True)
        return given[NAME_BYTES:]


def read_seals(path: Path | None) -> Seals:
    """Return the seals of the key in a file, or of a new key without one.

    Raises ConfigError when the file cannot be read or holds too little to be a secret.
    """
    if path is None:
        return Seals()
    secret = read_file(path, FLAG).strip()
    if len(secret) < KEY_BYTES:
        problem = f"it holds {len(secret)} bytes; a key needs at least {KEY_BYTES} random ones"
        raise flag_error(FLAG, path, problem)
    return Seals(secret)


def _derived(secret: bytes, purpose: str) -> bytes:
    """Return a key for one purpose, so that none of them tells anything about another."""
    return hmac.digest(secret, f"jaxserve {purpose}".encode(), "sha256")


def _written(given: bytes) -> str:
    return urlsafe_b64encode(given).decode("ascii")
