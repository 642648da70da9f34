"""Checks of flags that need neither jax nor a device; importing jax takes seconds."""

import argparse
import errno
import logging
import os
import stat
from pathlib import Path
from tempfile import TemporaryFile

from jaxserve.cache_folders import check_compilation_cache
from jaxserve.checkpoints.hf import check_folder
from jaxserve.checkpoints.hub.names import HubModel
from jaxserve.cli.flags import draft_model, engine_options
from jaxserve.config import check_draft_model, check_options
from jaxserve.config.option import flag_of
from jaxserve.errors import ConfigError, flag_text
from jaxserve.models.precision import check_dtype, check_form


def check_engine_flags(args: argparse.Namespace) -> None:
    """Check the flags of `engine_flags`, as far as they stand without the model and the devices.

    ModelError is raised for the name of a precision, ConfigError for another flag.
    """
    check_dtype(args.dtype)
    check_form(args.weights)
    options = engine_options(args)
    check_options(options)
    check_draft_model(options, draft_model(args))
    for axis in ("data", "expert", "tensor"):
        size = getattr(args, axis)
        if size < 1:
            raise ConfigError(flag_text(flag_of(axis), size, "it must be at least 1"))


def resolve_models(args: argparse.Namespace) -> None:
    """Check the models and folders of these flags; args.model becomes org/name at its commit.

    Raises CheckpointError or ConfigError for what cannot be used. Not for a host of a pod: if it
    ended before it has joined, the others would wait for it.
    """
    args.model = found_model(args.model)
    if args.draft_model:
        args.draft_model = found_model(args.draft_model)
    if getattr(args, "bundle", None) is None:  # which has compiled steps of its own
        check_compilation_cache(args.compilation_cache)


def found_model(given: Path | HubModel) -> Path | HubModel:
    """Return the folder of a model as it is, and a model of the hub at its commit.

    Raises CheckpointError if there is neither such a folder nor such a model.
    """
    if isinstance(given, Path):
        check_folder(given)
        return given
    from jaxserve.checkpoints.hub.lookup import find  # late: it imports huggingface_hub

    quiet_hub()
    return find(given).model


def quiet_hub() -> None:
    """Leave it to our own errors and warnings to say what fails on the hub.

    huggingface_hub warns of every retry, with the whole address, signature included.
    """
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def check_file(flag: str, path: Path | None) -> None:
    """Raise ConfigError if the file of a flag, where given, cannot be read."""
    if path is None:
        return
    if problem := _why_unreadable(path):
        raise ConfigError(flag_text(flag, path, f"it cannot be read: {problem}"))


def check_new_file(flag: str, path: Path | None) -> None:
    """Raise ConfigError if the file of a flag, where given, cannot be written."""
    if path is None:
        return
    try:
        if path.exists():
            writable = os.access(path, os.W_OK) and not path.is_dir()
        else:
            # Permissions say nothing for root, nor on file systems such as /proc.
            with TemporaryFile(dir=path.parent):
                writable = True
    except OSError:
        writable = False
    if not writable:
        raise ConfigError(flag_text(flag, path, "no file can be written there (name another)"))


def _why_unreadable(path: Path) -> str | None:
    """Return why a file cannot be read; None if it can. It is not opened: a pipe is read once."""
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        return error.strerror
    if is_folder:
        return os.strerror(errno.EISDIR)
    return None if os.access(path, os.R_OK) else os.strerror(errno.EACCES)
