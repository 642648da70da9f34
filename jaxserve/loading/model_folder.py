"""Folder of a model that is given by a path, or by its name on the hub."""

from collections.abc import Callable
from pathlib import Path

from jaxserve.checkpoints.hf import read_configs
from jaxserve.checkpoints.hub.names import hub_model
from jaxserve.loading.spec import read_spec
from jaxserve.models.spec import ModelSpec

Report = Callable[[int, int, str], None]  # bytes done, bytes in total, name of the file
Check = Callable[[ModelSpec, str | None], None]  # the architecture, dtype that config.json names


def model_folder(
    given: str | Path, report: Report, check: Check = lambda spec, dtype: None
) -> Path:
    """Return the folder of a model; one of the hub is fetched as far as the hub's cache lacks it.

    Args:
        given: Path of a folder, or org/name[@revision]. A path that exists comes first.
        report: Called while files are fetched, by several threads, by one at a time.
        check: Called with what config.json says, before anything large is fetched. Its errors pass.

    Raises:
        ModelError: The architecture is not implemented.
        CheckpointError: The hub has no such model, or it cannot be fetched.
    """
    model = hub_model(given)
    if model is None:
        return Path(given)
    from jaxserve.checkpoints.hub.files import fetch  # late: it imports huggingface_hub
    from jaxserve.checkpoints.hub.lookup import find

    snapshot = find(model)
    config = read_configs(snapshot.folder)["config"]
    _, spec = read_spec(config)
    check(spec, config.get("dtype") or config.get("torch_dtype"))
    return fetch(snapshot, report)
