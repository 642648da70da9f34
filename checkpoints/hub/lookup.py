"""Looks a model up on the hub: its commit, the list of its files, and its config.json."""

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import RemoteEntryNotFoundError, RevisionResolutionError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoSibling

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hub.errors import hub_errors, is_unreachable
from jaxserve.checkpoints.hub.names import HubModel
from jaxserve.checkpoints.hub.watched import unwatched

CONFIG = "config.json"
TIMEOUT = 10.0  # seconds for the hub to answer what a name stands for
OWN = "jaxserve"  # folder of what this program keeps beside a model in the hub's cache
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubFile:
    """A file of a commit."""

    path: str
    size: int  # in bytes
    content: str  # name that the hub gives it: sha256 of a large file, else git's hash of it
    sha256: str  # of a large file, else empty


@dataclass(frozen=True)
class Snapshot:
    """A model at one commit."""

    model: HubModel  # its revision is the commit
    folder: Path  # place of its files in the hub's cache
    # Files of the commit by their paths; None where neither the hub nor the cache says.
    files: Mapping[str, HubFile] | None

    @property
    def cache(self) -> Path:
        """Folder of the model, in all its commits."""
        return cache_of(self.model)


def cache_of(model: HubModel) -> Path:
    """Return the folder of a model in the hub's cache."""
    name = repo_folder_name(repo_id=model.repo, repo_type="model")
    return Path(constants.HF_HUB_CACHE).expanduser().resolve() / name


def find(model: HubModel) -> Snapshot:
    """Find the commit that a name stands for, and fetch its config.json.

    The files of a commit never change: their list is kept, and the hub is not asked for it again.
    Where the hub does not answer, the commit is the one that the cache knows, with a warning in the
    log. CheckpointError in one line: there is no such model or revision, it is gated, the hub
    cannot be reached, or the model has no config.json.
    """
    with hub_errors(model):
        files = _kept_list(model) if model.commit else None
        if files is None:
            model, files = _ask(model)
        if files is not None and CONFIG not in files:
            raise _no_config(model)
        try:
            config = download(model, CONFIG, unwatched())
        except RemoteEntryNotFoundError:
            raise _no_config(model) from None
    return Snapshot(model, config.parent, files)


def _no_config(model: HubModel) -> CheckpointError:
    return CheckpointError(
        f"{model}: has no {CONFIG}; give a model in the layout of transformers (GGUF files and "
        f"adapters alone are not read)"
    )


def download(model: HubModel, file: str, bar: type) -> Path:
    """Fetch one file of a commit unless the cache has it, and return its path there.

    For `bar` see watched.py. The errors are huggingface_hub's.
    """
    found = HfApi().hf_hub_download(model.repo, file, revision=model.revision, tqdm_class=bar)
    return Path(found)


def _ask(model: HubModel) -> tuple[HubModel, Mapping[str, HubFile] | None]:
    """Return the model at its commit, and its files, as the hub says, or else the cache."""
    api = HfApi()
    try:
        info = api.model_info(
            model.repo, revision=model.revision, files_metadata=True, timeout=TIMEOUT
        )
    except Exception as error:
        if not is_unreachable(error):
            raise
        return _known(model, error)
    found = HubModel(model.repo, info.sha)
    files = {sibling.rfilename: _file(sibling) for sibling in info.siblings or ()}
    _keep(model, found, files)
    return found, files


def _known(model: HubModel, error: Exception) -> tuple[HubModel, Mapping[str, HubFile] | None]:
    """Return what the cache knows of a model; `error` if it knows nothing."""
    api = HfApi()
    try:
        known = api.resolve_revision(model.repo, revision=model.revision, local_files_only=True)
    except RevisionResolutionError:
        raise error from None
    found = HubModel(model.repo, known.resolved)
    if not constants.HF_HUB_OFFLINE:
        reason = " ".join(str(error).split())
        log.warning("%s: taken from the cache, since the hub does not answer: %s", found, reason)
    return found, _kept_list(found)


def _file(sibling: RepoSibling) -> HubFile:
    sha256 = sibling.lfs.sha256 if sibling.lfs else ""
    return HubFile(sibling.rfilename, sibling.size or 0, sha256 or sibling.blob_id or "", sha256)


def _list_path(model: HubModel) -> Path:
    return cache_of(model) / OWN / f"{model.revision}.json"


def _kept_list(model: HubModel) -> Mapping[str, HubFile] | None:
    """Return the files of a commit, if they were listed before."""
    try:
        entries = json.loads(_list_path(model).read_bytes())
        return {entry["path"]: HubFile(**entry) for entry in entries}
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _keep(model: HubModel, found: HubModel, files: Mapping[str, HubFile]) -> None:
    """Remember the commit of a revision as huggingface_hub does, and the files of the commit.

    A cache that cannot be written is used without.
    """
    with suppress(OSError):
        listed = json.dumps([asdict(file) for file in files.values()])
        _write(_list_path(found), listed)
        if not model.commit:
            revision = model.revision or constants.DEFAULT_REVISION
            _write(cache_of(model) / "refs" / revision, found.revision or "")


def _write(path: Path, text: str) -> None:
    """Write a file so that a reader finds all of it, or the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_text(text)
    new.replace(path)
