"""A jax profile, written for a bounded time."""

import asyncio
import time
from pathlib import Path

import jax

from jaxserve.errors import ConfigError, RequestError

DEFAULT_SECONDS, MAX_SECONDS = 10.0, 60.0


class Profiler:
    """One profile at a time, into folders of their own under `folder`; None: the operator allows none."""

    def __init__(self, folder: Path | None):
        self._folder = folder
        self._current: Path | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lock = asyncio.Lock()

    async def start(self, seconds: float | None = None) -> str:
        """Begin; it ends by itself after so many seconds. Returns its folder."""
        seconds = DEFAULT_SECONDS if seconds is None else seconds
        if not 0 < seconds <= MAX_SECONDS:
            raise RequestError("max_seconds", f"is {seconds:g}; it must be above 0 and at most {MAX_SECONDS:g}")
        if self._folder is None:
            raise ConfigError("this server writes no profiles (start it with --profile-dir DIR)")
        async with self._lock:
            if self._current:
                raise ConfigError(f"a profile is being written to {self._current} (StopProfile ends it)")
            folder = self._folder / time.strftime("%Y%m%d-%H%M%S")
            await asyncio.to_thread(jax.profiler.start_trace, str(folder))
            self._current = folder
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds, lambda: loop.create_task(self.close()))
            return str(folder)

    async def stop(self) -> str:
        """End it; returns its folder."""
        async with self._lock:
            if self._current is None or self._timer is None:
                raise ConfigError("no profile is being written (StartProfile begins one)")
            self._timer.cancel()
            folder, self._current = self._current, None
            await asyncio.to_thread(jax.profiler.stop_trace)
            return str(folder)

    async def close(self) -> None:
        """End what is being written, if anything."""
        if self._current:
            await self.stop()
