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
_OPTIONS_IN_USE = threading.RLock()


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
    if chosen is None or jax.config.jax_compilation_cache_dir:
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


@contextmanager
def compiled_steps_kept(folder: Path | None) -> Iterator[None]:
    """Read and write what compiles inside in a folder, unless the program has a cache of its own.

    jax's options are the program's again afterwards, but for those that it has set meanwhile. With
    None nothing is changed. Threads take turns, since jax's options are those of the process.
    """
    if folder is None:
        yield
        return
    with _OPTIONS_IN_USE:
        if jax.config.jax_compilation_cache_dir:
            yield
            return
        before = _options()
        share_compiled(folder)
        shared = _options()
        try:
            # jax looks at its options once, at the first compile, which may have been before.
            jax_cache.reset_cache()
            yield
        finally:
            for name, value in before.items():
                if getattr(jax.config, name) == shared[name]:
                    jax.config.update(name, value)
            jax_cache.reset_cache()


def _options() -> dict[str, Any]:
    return {name: getattr(jax.config, name) for name in OPTIONS}


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
