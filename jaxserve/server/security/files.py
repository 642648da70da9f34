"""Files that flags of the server name."""

from pathlib import Path

from jaxserve.errors import flag_error
from jaxserve.tls_files import check_certificates

MAX_TOKEN_BYTES = 4096


def read_file(path: Path, flag: str) -> bytes:
    """Return the contents of a file; ConfigError names the flag when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise flag_error(flag, path, f"it cannot be read: {error.strerror}") from None


def read_certificates(path: Path | None, flag: str) -> bytes | None:
    """Return the certificates in a PEM file, None without a file; ConfigError if there are none."""
    if path is None:
        return None
    pem = read_file(path, flag)
    check_certificates(flag, path, pem)
    return pem


def read_token(path: Path | None, flag: str) -> str | None:
    """Return the token in a file, None without a file.

    Raises ConfigError when the file cannot be read or does not hold exactly one token.
    """
    if path is None:
        return None
    token = read_file(path, flag).decode("utf-8", "replace").strip()
    is_word = token.isascii() and token.isprintable() and " " not in token
    if not is_word or not 1 <= len(token) <= MAX_TOKEN_BYTES:
        raise flag_error(
            flag, path, f"it holds no token (one line of 1 to {MAX_TOKEN_BYTES} ASCII letters)"
        )
    return token
