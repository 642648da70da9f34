"""Model of a plan: the config.json of a checkpoint, or one that ships with the planner; no jax."""

from pathlib import Path
from typing import Any

from jaxserve.checkpoints.safetensors_reader import parse_json_object
from jaxserve.errors import ModelError, flag_text

CONFIGS = Path(__file__).parent / "configs"


def shipped() -> list[str]:
    """Return the names of the models whose config.json ships with the planner."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def read_config(given: str) -> tuple[str, dict[str, Any]]:
    """Return the model's name and its config.json.

    Raises ModelError if there is no such file, and CheckpointError if it is no JSON object.
    """
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
                f"{path} cannot be read: {error.strerror} (give a folder, a config.json, or one of "
                f"{', '.join(shipped())})",
            )
        ) from None
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return name, parse_json_object(raw, path)


def embeds(given: str) -> bool:
    """Return whether this is the folder of a model that embeds.

    Such a folder has the modules.json of sentence-transformers.
    """
    return given not in shipped() and (Path(given) / "modules.json").exists()
