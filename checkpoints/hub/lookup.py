"""Looks a model up on the hub: its commit, and its config.json."""

import logging
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import RemoteEntryNotFoundError
from huggingface_hub.hf_api import RepoFile

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hub.errors import RAISED, hub_errors, is_unreachable
from jaxserve.checkpoints.hub.names import HubModel
from jaxserve.checkpoints.hub.watched import unwatched

CONFIG = "config.json"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """A model at one commit.

    model: its revision is the commit. folder: place of its files in the hub's cache.
    """

    model: HubModel
    folder: Path


def find(model: HubModel) -> Snapshot:
    """Find the commit that a name stands for, and fetch its config.json.

    Without the hub, the commit is the one that the cache knows, with a warning in the log, and a
    commit that is given is not looked up. CheckpointError in one line: there is no such model or
    revision, it is gated, the hub cannot be reached, or the model has no config.json.
    """
    with hub_errors(model):
        commit = HfApi().resolve_revision(model.repo, revision=model.revision).resolved
        try:
            config = download(HubModel(model.repo, commit), CONFIG, unwatched())
        except RemoteEntryNotFoundError:
            raise CheckpointError(
                f"{model}: has no {CONFIG}; give a model in the layout of transformers (GGUF files "
                f"and adapters alone are not read)"
            ) from None
    return Snapshot(HubModel(model.repo, commit), config.parent)


def download(model: HubModel, file: str, bar: type) -> Path:
    """Fetch one file of a commit unless the cache has it, and return its path there.

    bar: see watched.py. The errors are huggingface_hub's.
    """
    found = HfApi().hf_hub_download(model.repo, file, revision=model.revision, tqdm_class=bar)
    return Path(found)


def listed(snapshot: Snapshot) -> dict[str, RepoFile] | None:
    """Return the files of a model by their paths; None where the hub cannot be asked."""
    model = snapshot.model
    with hub_errors(model):
        try:
            tree = HfApi().list_repo_tree(model.repo, recursive=True, revision=model.revision)
            return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
        except RAISED as error:
            if not is_unreachable(error):
                raise
            log.warning("%s: the hub does not list its files (%s)", model, error)
            return None
