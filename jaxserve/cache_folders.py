"""Folders in which compiled steps are kept, and what the environment says of compiling; no jax."""

import os
from pathlib import Path
from tempfile import TemporaryFile


def default_compilation_cache() -> Path | None:
    """Return the user's cache folder for jaxserve; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "jaxserve" / "xla" if os.path.isabs(base) else None


def compiler_flags() -> str:
    """Return the flags that the environment gives XLA's compiler."""
    return os.environ.get("XLA_FLAGS", "")


def folder_problem(folder: Path | None) -> str | None:
    """Make the folder, and return why it cannot be used; None if it can."""
    if folder is None:
        return "there is no home directory"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Permissions say nothing for root, nor on file systems such as /proc.
        with TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror
