"""Addresses of prefill servers: from flags, and from a file that may change while the server
runs."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from jaxserve.errors import ConfigError

EVERY = 1.0  # seconds
log = logging.getLogger(__name__)


def check_address(text: str) -> str:
    """ConfigError for what is not HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not (host and host.isprintable() and " " not in host and port.isascii() and port.isdigit()):
        raise ConfigError(f"{text!r:.80} is not an address like 10.0.0.7:50051")
    if len(port) > 5 or not 0 < int(port) < 2**16:
        raise ConfigError(f"{text!r:.80}: ports are 1 to 65535")
    return text


def read_addresses(path: Path) -> list[str]:
    """An address per line, and comments behind "#". ConfigError with the line that is none."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(f"--prefill-servers-file {path}: {problem}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if text := line.partition("#")[0].strip():
            try:
                found.append(check_address(text))
            except ConfigError as error:
                raise ConfigError(
                    f"--prefill-servers-file {path}, line {number}: {error}"
                ) from None
    return found


async def follow(path: Path, change: Callable[[Iterable[str]], None]) -> None:
    """Tell of the addresses in the file, now and whenever it changes; what cannot be read changes
    nothing.
    """
    seen: object = None
    while True:
        if (stamp := _stamp(path)) != seen:
            try:
                change(read_addresses(path))
            except ConfigError as error:
                log.warning("%s; the servers stay as they were", error)
            except Exception:
                log.exception("--prefill-servers-file %s; the servers may not be those in it", path)
            seen = stamp
        await asyncio.sleep(EVERY)


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino
