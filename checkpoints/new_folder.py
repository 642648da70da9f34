"""Writes a folder so that it exists under its name only once it is complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hf import INDEX, UNFINISHED
from jaxserve.checkpoints.orbax_store import MANIFEST, WEIGHTS

# Ends of the names of files that are copied beside the weights: configs, tokenizers, chat
# templates and licences.
COPIED: Final = (".json", ".jinja", ".model", ".txt", ".md", "LICENSE", "NOTICE")


@contextmanager
def new_folder(source: Path, target: Path) -> Iterator[Path]:
    """Yield a folder beside `target` that is renamed to it at the end, or removed on failure.

    When the process is killed the unfinished folder stays, under a name that no loader accepts.
    CheckpointError when `target` exists, lies in `source`, or cannot be written.
    """
    unfinished = target.with_name(target.name + UNFINISHED)
    check_target(target)
    if source.resolve() in target.resolve().parents:
        raise CheckpointError(
            f"{target} is in {source}, whose files are copied; name a folder elsewhere"
        )
    try:
        unfinished.mkdir()
    except FileExistsError:
        raise CheckpointError(
            f"{unfinished} is there already (a conversion that runs, or one that was "
            f"interrupted: then remove it)"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{unfinished} cannot be made ({error.strerror})") from error
    try:
        yield unfinished
        unfinished.rename(target)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{unfinished} cannot be written ({error})") from error
        raise


def check_target(target: Path) -> None:
    """Raise CheckpointError if the folder to be written exists."""
    if target.exists():
        raise CheckpointError(f"{target} is there already; name another folder, or remove it")


def copy_other_files(source: Path, folder: Path) -> None:
    """Copy the files beside the weights of `source`, with their subfolders."""
    for directory, inner, names in os.walk(source):
        # os.walk descends into what is left of `inner`.
        inner[:] = [name for name in inner if not name.startswith(".") and name != WEIGHTS]
        for name in names:
            if name.endswith(COPIED) and name not in (INDEX, MANIFEST):
                to = folder / Path(directory).relative_to(source) / name
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(Path(directory, name), to)
