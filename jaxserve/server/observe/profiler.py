"""Profiles of jax, written for a bounded time to a folder that the operator chose."""

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import jax

from jaxserve.errors import ConfigError, RequestError
from jaxserve.flag_errors import flag_error

DEFAULT_SECONDS = 10.0
MAX_SECONDS = 60.0
MAX_PROFILES = 32  # entries of the folder, so that repeated calls cannot fill the disk
log = logging.getLogger(__name__)


class Profiler:
    """Writes one profile at a time, each into a new folder. Lives on the event loop.

    Work that a call has begun is not interrupted when its client disconnects: jax's profiler would
    stay started, or a folder half written.

    Args:
        folder: Parent of the profiles' folders; None: the operator allows no profiles.
    """

    def __init__(self, folder: Path | None):
        self._folder = folder
        self._current: Path | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, seconds: float | None = None) -> str:
        """Begin a profile that ends by itself after `seconds`; return its folder."""
        seconds = DEFAULT_SECONDS if seconds is None else seconds
        if not 0 < seconds <= MAX_SECONDS:
            raise RequestError(
                "max_seconds", f"is {seconds:g}; it must be above 0 and at most {MAX_SECONDS:g}"
            )
        if self._folder is None:
            raise ConfigError("this server writes no profiles (start it with --profile-dir DIR)")
        return str(await asyncio.shield(self._task(self._start(self._folder, seconds))))

    async def stop(self) -> str:
        """End the profile that is being written; return its folder."""
        folder = self._current
        if folder is None:
            raise ConfigError("no profile is being written (StartProfile begins one)")
        await asyncio.shield(self._task(self._end(folder)))
        return str(folder)

    async def close(self) -> None:
        """End the profile that is being written, if any, and allow no more."""
        self._folder = None
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._current:
            await self.stop()

    def _task[T](self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start(self, parent: Path, seconds: float) -> Path:
        async with self._lock:
            if self._current:
                raise ConfigError(
                    f"a profile is being written to {self._current} (StopProfile ends it)"
                )
            folder = await asyncio.to_thread(_begin, parent)
            self._current = folder
            self._timer = asyncio.get_running_loop().call_later(seconds, self._expire, folder)
            return folder

    def _expire(self, folder: Path) -> None:
        self._task(self._end(folder)).add_done_callback(_log_failure)

    async def _end(self, folder: Path) -> None:
        """End the profile in this folder, if it has not ended yet."""
        async with self._lock:
            # StopProfile and the timer may both be waiting for the lock, and a later profile may
            # have begun in between.
            if self._current != folder or self._timer is None:
                return
            self._timer.cancel()
            self._current = None
            await asyncio.to_thread(jax.profiler.stop_trace)


def _begin(parent: Path) -> Path:
    """Start a profile and return its new folder; ConfigError when no more can be written."""
    folder = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        profiles = len(list(parent.iterdir()))
        if profiles >= MAX_PROFILES:
            problem = f"it has {profiles} entries, and the limit is {MAX_PROFILES} (remove some)"
            raise flag_error("--profile-dir", parent, problem)
        folder.mkdir()
    except OSError as error:
        problem = f"no profile can be written: {error.strerror}"
        raise flag_error("--profile-dir", parent, problem) from None
    jax.profiler.start_trace(str(folder))
    return folder


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("a profile could not be written", exc_info=error)
