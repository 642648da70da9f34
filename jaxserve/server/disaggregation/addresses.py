"""Addresses of prefill servers, from flags and from a file that may change at any time."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from jaxserve.addresses import server_problem
from jaxserve.errors import ConfigError
from jaxserve.flag_errors import flag_error

POLL_SECONDS = 1.0  # between two looks at the file
log = logging.getLogger(__name__)


def read_addresses(path: Path) -> list[str]:
    """Read one address per line, with comments behind "#"; ConfigError names the line at fault."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or error
        raise flag_error("--prefill-servers-file", path, f"it cannot be read: {problem}") from None
    found = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if problem := server_problem(text):
            wrong = f"line {number} is {text!r:.80}; {problem}"
            raise flag_error("--prefill-servers-file", path, wrong)
        found.append(text)
    return found


async def follow(path: Path, change: Callable[[Iterable[str]], None]) -> None:
    """Call `change` with the file's addresses, now and whenever the file changes.

    A file that cannot be read, or has an error, changes nothing.
    """
    seen: object = None
    while True:
        stamp = _stamp(path)
        if stamp != seen:
            try:
                change(read_addresses(path))
            except ConfigError as error:
                log.warning("%s; the prefill servers stay as they were", error)
            except Exception:
                log.exception(
                    "--prefill-servers-file %s: a change failed; some of its servers may not be "
                    "in use",
                    path,
                )
            seen = stamp
        await asyncio.sleep(POLL_SECONDS)


def _stamp(path: Path) -> tuple[int, ...]:
    """Return numbers that differ after the file was written or replaced; () if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino
