"""Checks of flags that need neither jax nor a device; importing jax takes seconds."""

import errno
import logging
import os
import stat
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Protocol

from jaxserve.checkpoints.hf import check_folder
from jaxserve.checkpoints.hub.names import HubModel
from jaxserve.cli.flags import EngineFlags, draft_model_of
from jaxserve.cluster.hosts import HostOptions
from jaxserve.config import check_draft_model, check_options
from jaxserve.config.option import flag_of
from jaxserve.flag_errors import flag_error
from jaxserve.models.precision import check_dtype, check_form, check_product


def check_engine_flags(engine: EngineFlags, hosts: HostOptions) -> None:
    """Check the options of an engine, as far as they stand without the model and the devices.

    ModelError is raised for the name of a precision, ConfigError for another option.
    """
    check_dtype(engine.dtype)
    check_form(engine.weights)
    check_product(engine.product)
    check_options(engine.options)
    check_draft_model(engine.options, draft_model_of(engine, hosts))
    for axis, size in engine.axes.items():
        if size < 1:
            raise flag_error(flag_of(axis), size, "it must be at least 1")


class LoadsModel(Protocol):
    """Options of a program that loads a model."""

    @property
    def model(self) -> Path | HubModel: ...

    @property
    def engine(self) -> EngineFlags: ...


def with_found_models[T: LoadsModel](options: T) -> T:
    """Return options whose models are folders that exist, or models of the hub at their commits.

    Not for a host of a pod: if the host ended before it has joined, the others would wait for it.

    Raises:
        CheckpointError: A model cannot be used.
    """
    model = found_model(options.model)
    engine = options.engine
    if engine.draft_model:
        engine = replace(engine, draft_model=found_model(engine.draft_model))
    return replace(options, model=model, engine=engine)  # type: ignore[type-var]


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
    if path is not None and (problem := _why_unreadable(path)):
        raise flag_error(flag, path, f"it cannot be read: {problem}")


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
        raise flag_error(flag, path, "no file can be written there (name another)")


def _why_unreadable(path: Path) -> str | None:
    """Return why a file cannot be read; None if it can. It is not opened: a pipe is read once."""
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        return error.strerror
    if is_folder:
        return os.strerror(errno.EISDIR)
    return None if os.access(path, os.R_OK) else os.strerror(errno.EACCES)
