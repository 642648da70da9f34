"""Files that flags name."""

from pathlib import Path

from jaxserve.errors import ConfigError

MAX_TOKEN_BYTES = 4096


def read_file(path: Path, flag: str) -> bytes:
    """ConfigError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None


def read_token(path: Path | None, flag: str) -> str | None:
    """None without a file; ConfigError when it cannot be read, or holds no token."""
    if path is None:
        return None
    token = read_file(path, flag).decode("utf-8", "replace").strip()
    if (
        not (token.isascii() and token.isprintable() and 1 <= len(token) <= MAX_TOKEN_BYTES)
        or " " in token
    ):
        raise ConfigError(
            f"{flag} {path}: holds no token (one line of 1 to {MAX_TOKEN_BYTES} ASCII letters)"
        )
    return token
