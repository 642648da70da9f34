"""Folder of a model that is given by a path, or by its name on the hub."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.checkpoints.hf import read_configs
from jaxserve.checkpoints.hub.names import Given, HubModel, hub_model
from jaxserve.loading.spec import read_spec
from jaxserve.models.families.weight_table import Stored
from jaxserve.models.spec import ModelSpec

if TYPE_CHECKING:
    from jaxserve.checkpoints.hub.lookup import Snapshot

Report = Callable[[int, int, str], None]  # bytes done, bytes in total, name of the file
Check = Callable[[Mapping[str, Any], ModelSpec], None]  # config.json, and what it describes


def no_check(config: Mapping[str, Any], spec: ModelSpec) -> None:
    """Accept every model."""


def model_folder(given: Given, report: Report, check: Check = no_check) -> Path:
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
    given: Given, report: Report, check: Check = no_check
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
    check(*_described(snapshot.folder))
    return snapshot


def described(given: Given) -> tuple[Mapping[str, Any], ModelSpec]:
    """Return the config.json of a model, and what it describes.

    Of a model of the hub nothing else is fetched. ModelError if the architecture is not
    implemented, CheckpointError if there is no such model.
    """
    model = hub_model(given)
    if model is None:
        return _described(Path(str(given)))
    from jaxserve.checkpoints.hub.lookup import find

    return _described(find(model).folder)


def _described(folder: Path) -> tuple[Mapping[str, Any], ModelSpec]:
    config = read_configs(folder)["config"]
    return config, read_spec(config)[1]
