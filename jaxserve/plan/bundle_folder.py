"""Folder of a bundle: where a new one can be made, and the manifest of an old one; no jax."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.safetensors_reader import parse_json_object
from jaxserve.errors import ConfigError
from jaxserve.flag_errors import flag_error

MANIFEST = "manifest.json"
CACHE = "cache"
FORMAT = 2


def check_free(folder: Path) -> None:
    """Raise ConfigError if the folder has something in it, is no folder, or cannot be made."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise flag_error(
            "--out", folder, "there is a bundle or a file already (remove it, or name another)"
        )
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with TemporaryDirectory(dir=existing):
            pass
    except OSError as error:
        problem = f"no folder can be made there: {error.strerror}"
        raise flag_error("--out", folder, problem) from None


def new_folder(folder: Path) -> Path:
    """Make the folder of a bundle and return its cache folder; ConfigError if it is not empty."""
    check_free(folder)
    try:
        (folder / CACHE).mkdir(parents=True)
    except OSError as error:
        raise flag_error("--out", folder, f"it cannot be made: {error.strerror}") from None
    return folder / CACHE


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a bundle as JSON; ConfigError if it is none, or of another version."""
    path = folder / MANIFEST
    try:
        found = parse_json_object(path.read_bytes(), path)
    except OSError as error:
        raise refusal(folder, f"its {MANIFEST} cannot be read: {error.strerror}") from None
    except CheckpointError as error:
        raise refusal(folder, f"its {MANIFEST} is not one: {error}") from None
    if found.get("format") != FORMAT:
        raise refusal(folder, "it is of another version of bundles (make it again)")
    return found


def refusal(folder: Path, problem: str) -> ConfigError:
    """Return the error about a bundle that cannot be used."""
    return flag_error("--bundle", folder, problem)
