"""Compilation cache on disk, which keeps compiled steps from one start to the next."""

import errno
import os
import sys
from pathlib import Path

import jax

from jaxserve.errors import ConfigError, flag_text

# Beyond this size, the steps that were used longest ago are deleted. The bound is high (a step of a
# large model on a TPU takes 100 MB), but there has to be one: without a bound, jax writes entries
# without a lock, and another process may read half of one.
CACHE_BYTES = 32 * 2**30


def use_compilation_cache(chosen: Path | None) -> None:
    """Keep compiled steps on disk, so that the next start finds them.

    chosen: the folder of --compilation-cache; None is the user's cache. Raises ConfigError if the
    chosen folder cannot be written; without one, a line on standard error says so.
    """
    folder = chosen or default_compilation_cache()
    try:
        if folder is None:
            raise FileNotFoundError(errno.ENOENT, "there is no home directory")
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        if chosen:
            raise ConfigError(
                flag_text("--compilation-cache", chosen, f"it cannot be used: {error.strerror}")
            ) from None
        print(
            f"compiled steps are not kept: {folder or '~'}: {error.strerror} (--compilation-cache)",
            file=sys.stderr,
        )
        return
    share_compiled(folder)


def share_compiled(folder: Path) -> None:
    """Read and write compiled steps in a folder that other processes use at the same time."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def read_compiled(folder: Path) -> None:
    """Find compiled steps in this folder, and write nothing to it."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update(
        "jax_compilation_cache_max_size", -1
    )  # a bounded cache writes a note of every use
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))


def default_compilation_cache() -> Path | None:
    """Return the user's cache folder for jaxserve; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "jaxserve" / "xla" if os.path.isabs(base) else None
