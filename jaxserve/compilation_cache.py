"""Compilation cache on disk, which keeps compiled steps from one start to the next."""

import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock, Timeout
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from jaxserve.cache_folders import default_compilation_cache, folder_problem

# Beyond this size, the steps that were used longest ago are deleted. The bound is high (a step of a
# large model on a TPU takes 100 MB), but there has to be one: without a bound, jax writes entries
# without a lock, and another process may read half of one.
CACHE_BYTES = 32 * 2**30
# Warnings of jax, of which there may be one for each step.
ENTRY_PROBLEM = re.compile(
    r"Error (reading|writing) persistent compilation cache entry for '[^']*': (.*)", re.DOTALL
)
# Options of jax that share_compiled sets.
OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


def use_compilation_cache(chosen: Path | None) -> None:
    """Keep compiled steps on disk, so that the next start of a command finds them.

    A folder that cannot be written, or entries that cannot be written or read, are one line on
    standard error each: the command goes on, and compiles what it does not find.

    Args:
        chosen: Folder of --compilation-cache; None is the folder of JAX_COMPILATION_CACHE_DIR, as
            jax uses it, or else the user's cache.
    """
    warnings.showwarning = CacheWarnings(warnings.showwarning)
    if chosen is None and jax.config.jax_compilation_cache_dir:
        return
    folder = chosen or default_compilation_cache()
    problem = folder_problem(folder)
    if problem or folder is None:
        print(_not_kept(folder, problem, "--compilation-cache"), file=sys.stderr)
        return
    share_compiled(folder)


def cache_of_llm(chosen: str | Path | None) -> Path | None:
    """Return the folder in which an LLM keeps compiled steps; None if it keeps none of its own.

    If the folder cannot be written, a RuntimeWarning says so.

    Args:
        chosen: Folder, "auto" for the user's cache, or None for no folder.

    Returns:
        The folder; None, too, where jax has been given a folder already, whatever is chosen.
    """
    if chosen is None or _OPTIONS.folder_of_program:
        return None
    folder = default_compilation_cache() if chosen == "auto" else Path(chosen).absolute()
    problem = folder_problem(folder)
    if problem is None:
        return folder
    text = _not_kept(folder, problem, "compilation_cache")
    warnings.warn(text, RuntimeWarning, stacklevel=3)
    return None


def _not_kept(folder: Path | None, problem: str | None, option: str) -> str:
    return f"compiled steps are not kept: {folder or '~'}: {problem} ({option})"


class CacheWarnings:
    """Printer of warnings, which makes one line of all that jax says of entries of one kind.

    Args:
        others: Printer of all other warnings.
    """

    def __init__(self, others: Callable[..., None]):
        self._others = others
        self._said: set[str] = set()

    def __call__(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        found = ENTRY_PROBLEM.match(str(message))
        if found is None:
            self._others(message, *args, **kwargs)
            return
        kind, error = found.groups()
        if kind in self._said:
            return
        self._said.add(kind)
        folder = jax.config.jax_compilation_cache_dir
        what = f"compiled steps cannot be written, so the next start compiles them anew: {folder}"
        if kind == "reading":
            what = (
                f"kept steps are damaged, and compiled anew at each start until their folder is "
                f"removed: {folder}"
            )
        print(f"{what}: {error} (--compilation-cache)", file=sys.stderr)


class KeptSteps:
    """Folder in which an LLM keeps its compiled steps, as jax's options while it compiles.

    Where the program has given jax a folder, that one is used and nothing is changed. Afterwards
    jax's options are the program's again, but for those that it has set meanwhile. They are options
    of the process: while several LLMs compile, all use the folder of the first.
    """

    def __init__(self, folder: Path | None):
        self._folder = folder

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use the folder for the time of a block; blocks may overlap, and none waits for another.

        A compile keeps what it makes if the block lasts until its end.
        """
        if self._folder is None:
            yield
            return
        _OPTIONS.share(self._folder)
        try:
            yield
        finally:
            _OPTIONS.give_back()


class _SharedOptions:
    """jax's options of its cache, which belong to the program while no LLM uses them."""

    def __init__(self) -> None:
        # Never held while anything compiles. A finalizer that runs inside may need it again.
        self._lock = threading.RLock()
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


def finish_writing(seconds: float) -> None:
    """Wait until no process writes a compiled step to jax's folder, but not longer than `seconds`.

    From then on none does so: for a process that is about to end at once, in the middle of a
    compile.
    """
    folder = jax.config.jax_compilation_cache_dir
    if folder and jax.config.jax_compilation_cache_max_size != -1:  # else jax takes no lock
        with suppress(Timeout, OSError):
            FileLock(Path(folder) / ".lockfile").acquire(timeout=seconds)


def keeps_records() -> bool:
    """Return whether there is a folder of compiled steps, beside which records are kept."""
    return bool(jax.config.jax_compilation_cache_dir)


def has_record(key: str) -> bool:
    """Return whether there is a record with this key."""
    return read_record(key) is not None


def read_record(key: str) -> str | None:
    """Return the text of the record with this key; None if it is missing or cannot be read."""
    record = _record(key)
    try:
        return record.read_text() if record else None
    except (OSError, ValueError):
        return None


def keep_record(key: str, text: str = "") -> None:
    """Keep a record; nothing if it cannot be written. Its text is shorter than a disk's block."""
    if record := _record(key):
        with suppress(OSError):
            record.write_text(text)


def _record(key: str) -> Path | None:
    folder = jax.config.jax_compilation_cache_dir
    return Path(folder) / f"jaxserve-{key}" if folder else None
