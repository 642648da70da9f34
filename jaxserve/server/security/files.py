"""Files that flags of the server name."""

from pathlib import Path

from jaxserve.flag_errors import flag_error
from jaxserve.tls_files import check_certificates

MAX_TOKEN_BYTES = 4096
MAX_TOKENS = 100  # of clients; each call's token is compared with all of them


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


def read_tokens(path: Path | None, flag: str) -> tuple[str, ...]:
    """Return the tokens in a file, one in each line that is not empty; none without a file.

    Raises ConfigError when the file cannot be read, or a line does not hold exactly one token.
    """
    if path is None:
        return ()
    lines = [line.strip() for line in _text(path, flag).splitlines()]
    given = [(number, line) for number, line in enumerate(lines, 1) if line] or [(1, "")]
    tokens = dict.fromkeys(_checked(token, path, flag, number) for number, token in given)
    if len(tokens) > MAX_TOKENS:
        raise flag_error(flag, path, f"it holds {len(tokens)} tokens; the limit is {MAX_TOKENS}")
    return tuple(tokens)


def read_token(path: Path | None, flag: str) -> str | None:
    """Return the token in a file, None without a file.

    Raises ConfigError when the file cannot be read or does not hold exactly one token.
    """
    if path is None:
        return None
    return _checked(_text(path, flag).strip(), path, flag)


def _text(path: Path, flag: str) -> str:
    return read_file(path, flag).decode("utf-8", "replace")


def _checked(token: str, path: Path, flag: str, line: int = 1) -> str:
    is_word = token.isascii() and token.isprintable() and " " not in token
    if not is_word or not 1 <= len(token) <= MAX_TOKEN_BYTES:
        raise flag_error(
            flag,
            path,
            f"line {line} holds no token (1 to {MAX_TOKEN_BYTES} ASCII letters without a space)",
        )
    return token
