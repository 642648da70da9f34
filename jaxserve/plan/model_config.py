"""Model of a plan: the config.json of a checkpoint, or one that ships with the planner; no jax."""

import os
from pathlib import Path
from typing import Any

from jaxserve.checkpoints.hf import MODULES
from jaxserve.checkpoints.hub.names import as_text, folder_name, hub_model
from jaxserve.checkpoints.safetensors_reader import parse_json_object
from jaxserve.cli.checks import found_model
from jaxserve.errors import ModelError
from jaxserve.flag_errors import flag_text

CONFIGS = Path(__file__).parent / "configs"


def shipped() -> list[str]:
    """Return the names of the models whose config.json ships with the planner."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def pinned(given: str) -> str:
    """Return a model of the hub with its commit, which is then not asked for again."""
    model = hub_model(given)
    return str(found_model(model)) if model else given


def read_config(given: str) -> tuple[str, dict[str, Any]]:
    """Return the model's name and its config.json, the only file that is fetched from the hub.

    Args:
        given: Folder, config.json, name of a model that ships with the planner or, where there is
            no such path, org/name[@revision] of the hub.

    Raises:
        ModelError: There is no such file.
        CheckpointError: The file is no JSON object, or the hub does not have it.
    """
    if model := hub_model(given):
        from jaxserve.checkpoints.hub.lookup import find  # late: it imports huggingface_hub

        path = find(model).folder / "config.json"
        return model.repo, parse_json_object(path.read_bytes(), path)
    path = CONFIGS / f"{given}.json" if given in shipped() else Path(given)
    if path.is_dir():
        path = path / "config.json"
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ModelError(
            flag_text(
                "--model",
                given,
                f"{path} cannot be read: {error.strerror} (give a folder, a config.json, org/name "
                f"of the hub, or one of {', '.join(shipped())})",
            )
        ) from None
    name = folder_name(path.parent) if path.name == "config.json" else as_text(path.stem)
    return name, parse_json_object(raw, path)


def embeds(given: str) -> bool:
    """Return whether a model embeds: it then has the modules.json of sentence-transformers."""
    if model := hub_model(given):
        from jaxserve.checkpoints.hub.lookup import find

        snapshot = find(model)
        if snapshot.files is None:
            return os.path.lexists(snapshot.folder / MODULES)
        return MODULES in snapshot.files
    return given not in shipped() and os.path.lexists(Path(given) / MODULES)
