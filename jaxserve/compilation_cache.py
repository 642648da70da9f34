"""Compilation cache on disk, which keeps compiled steps from one start to the next."""

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from jaxserve.cache_folders import (
    check_compilation_cache,
    default_compilation_cache,
    folder_problem,
)
from jaxserve.errors import ConfigError

# Beyond this size, the steps that were used longest ago are deleted. The bound is high (a step of a
# large model on a TPU takes 100 MB), but there has to be one: without a bound, jax writes entries
# without a lock, and another process may read half of one.
CACHE_BYTES = 32 * 2**30
# Options of jax that share_compiled sets.
OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


def use_compilation_cache(chosen: Path | None) -> None:
    """Keep compiled steps on disk, so that the next start of a command finds them.

    If the user's cache cannot be written, a line on standard error says so.

    Args:
        chosen: Folder of --compilation-cache; None is the folder of JAX_COMPILATION_CACHE_DIR, as
            jax uses it, or else the user's cache.

    Raises:
        ConfigError: The chosen folder cannot be written.
    """
    if chosen is None and jax.config.jax_compilation_cache_dir:
        return
    check_compilation_cache(chosen)
    folder = chosen or default_compilation_cache()
    problem = folder_problem(folder)
    if problem or folder is None:
        text = f"compiled steps are not kept: {folder or '~'}: {problem} (--compilation-cache)"
        print(text, file=sys.stderr)
        return
    share_compiled(folder)


def cache_of_llm(chosen: str | Path | None) -> Path | None:
    """Return the folder in which an LLM keeps compiled steps; None if it keeps none of its own.

    If the user's cache cannot be written, a RuntimeWarning says so.

    Args:
        chosen: Folder, "auto" for the user's cache, or None for no folder.

    Returns:
        The folder; None, too, where jax has been given a folder already, whatever is chosen.

    Raises:
        ConfigError: The chosen folder cannot be written.
    """
    if chosen is None or _OPTIONS.folder_of_program:
        return None
    folder = default_compilation_cache() if chosen == "auto" else Path(chosen).absolute()
    problem = folder_problem(folder)
    if problem is None:
        return folder
    if chosen != "auto":
        raise ConfigError(f"compilation_cache {chosen} cannot be used: {problem}")
    text = f"compiled steps are not kept: {folder or '~'}: {problem} (compilation_cache)"
    warnings.warn(text, RuntimeWarning, stacklevel=3)
    return None


class KeptSteps:
    """Folder in which an LLM keeps its compiled steps, as jax's options while it is in use.

    Where the program has given jax a folder, that one is used and nothing is changed. Afterwards
    jax's options are the program's again, but for those that it has set meanwhile. They are options
    of the process: while several LLMs compile, all use the folder of the first.
    """

    def __init__(self, folder: Path | None):
        self._folder = folder
        self._in_use = False

    def use(self) -> None:
        """Use the folder from now on; using it twice does nothing."""
        if self._folder and not self._in_use:
            self._in_use = True
            _OPTIONS.share(self._folder)

    def leave(self) -> None:
        """Use it no more."""
        if self._in_use:
            self._in_use = False
            _OPTIONS.give_back()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use the folder for the time of a block, unless it is in use already."""
        if self._in_use:
            yield
            return
        self.use()
        try:
            yield
        finally:
            self.leave()


class _SharedOptions:
    """jax's options of its cache, which belong to the program while no LLM uses them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # never held while anything compiles
        self._users = 0
        self._before: dict[str, Any] | None = None  # of the program; None while they are its own
        self._set: dict[str, Any] = {}  # what was set instead

    @property
    def folder_of_program(self) -> str | None:
        """Folder that the program has given jax, if any."""
        with self._lock:
            of_jax = jax.config.jax_compilation_cache_dir
            if self._before is None or of_jax != self._set["jax_compilation_cache_dir"]:
                return of_jax
            return self._before["jax_compilation_cache_dir"]

    def share(self, folder: Path) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1 or jax.config.jax_compilation_cache_dir:
                return
            self._before = _options()
            share_compiled(folder)
            self._set = _options()
            # jax looks at its options once, at the first compile, which may have been before.
            jax_cache.reset_cache()

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users or self._before is None:
                return
            for name, value in self._before.items():
                if getattr(jax.config, name) == self._set[name]:
                    jax.config.update(name, value)
            self._before = None
            jax_cache.reset_cache()


def _options() -> dict[str, Any]:
    return {name: getattr(jax.config, name) for name in OPTIONS}


_OPTIONS = _SharedOptions()


def share_compiled(folder: Path) -> None:
    """Read and write compiled steps in a folder that other processes use at the same time."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def read_compiled(folder: Path) -> None:
    """Find compiled steps in this folder, and write nothing to it."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # A bounded cache writes a note of every use.
    jax.config.update("jax_compilation_cache_max_size", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))


def has_record(key: str) -> bool:
    """Return whether the folder of compiled steps has a record with this key."""
    record = _record(key)
    return record is not None and record.exists()


def keep_record(key: str) -> None:
    """Keep a record that all steps with this key were compiled; nothing if it cannot be written."""
    if record := _record(key):
        with suppress(OSError):
            record.touch()


def _record(key: str) -> Path | None:
    folder = jax.config.jax_compilation_cache_dir
    return Path(folder) / f"jaxserve-{key}" if folder else None
