"""Folder of a model that is given by a path, or by its name on the hub."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.checkpoints.hf import read_configs
from jaxserve.checkpoints.hub.names import Given, HubModel, hub_model
from jaxserve.loading.spec import read_spec
from jaxserve.models.families.weight_table import Stored
from jaxserve.models.spec import ModelSpec

if TYPE_CHECKING:
    from jaxserve.checkpoints.hub.lookup import Snapshot

Report = Callable[[int, int, str], None]  # bytes done, bytes in total, name of the file
Check = Callable[[ModelSpec], None]


def model_folder(given: Given, report: Report, check: Check = lambda spec: None) -> Path:
    """Return the folder of a model; one of the hub is fetched as far as the hub's cache lacks it.

    Args:
        given: Path of a folder, or org/name[@revision]. A path that exists comes first.
        report: Called while files are fetched, from several threads, never two at once.
        check: Called with what config.json says, before anything large is fetched. What it raises
            is passed on.

    Raises:
        ModelError: The architecture is not implemented.
        CheckpointError: The hub has no such model, or it cannot be fetched.
    """
    model = hub_model(given)
    if model is None:
        return Path(str(given))
    from jaxserve.checkpoints.hub.files import fetch  # late: it imports huggingface_hub

    return fetch(_checked(model, check), report)


def remote_model(
    given: Given, report: Report, check: Check = lambda spec: None
) -> tuple[Path, Mapping[str, Stored] | None]:
    """Return the folder of a model, and its weights if they are to be read from the hub.

    A model of the hub is fetched without its weights, of which a host then reads its part alone.
    Arguments and errors are as in `model_folder`.
    """
    model = hub_model(given)
    if model is None:
        return Path(str(given)), None
    from jaxserve.checkpoints.hub.files import fetch
    from jaxserve.checkpoints.hub.ranges import remote_tensors

    snapshot = _checked(model, check)
    return fetch(snapshot, report, weights=False), remote_tensors(snapshot)


def _checked(model: HubModel, check: Check) -> "Snapshot":
    from jaxserve.checkpoints.hub.lookup import find

    snapshot = find(model)
    config = read_configs(snapshot.folder)["config"]
    _, spec = read_spec(config)
    check(spec)
    return snapshot


def check_architecture(given: Given) -> None:
    """Raise ModelError if a model of the hub has an architecture that is not implemented.

    Its config.json alone is fetched. Folders are checked when they are loaded.
    """
    model = hub_model(given)
    if model:
        _checked(model, lambda spec: None)
