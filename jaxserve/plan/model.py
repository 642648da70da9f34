"""The model that is planned for: a config.json, of a folder, a file, or one of those that ship with
the planner.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from checkpoints.safetensors_reader import parse_json_object
from jaxserve.errors import ConfigError, ModelError
from jaxserve.loading.orbax_layout import choose_weights, stored_weights
from jaxserve.loading.parameters import DTYPES
from jaxserve.models.quant import HEAD, SCHEMES, QuantScheme, parse_scheme

CONFIGS = Path(__file__).parent / "configs"


def shipped() -> list[str]:
    """Names of the models whose config.json is here."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def read_config(given: str) -> tuple[str, dict[str, Any]]:
    """The model's name and its config.json. ModelError, or CheckpointError for a file that is no
    JSON object.
    """
    path = CONFIGS / f"{given}.json" if given in shipped() else Path(given)
    if path.is_dir():
        path = path / "config.json"
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ModelError(
            f"--model {given}: {path}: {error.strerror} (a folder, a config.json, or one of "
            f"{', '.join(shipped())})"
        ) from None
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return name, parse_json_object(raw, path)


def embeds(given: str) -> bool:
    """Whether it is the folder of a model that embeds: those have this file of
    sentence-transformers.
    """
    return given not in shipped() and (Path(given) / "modules.json").exists()


def weights_of(given: str, asked: str) -> str:
    """--weights, where auto is the form that a converted folder has; ModelError for another one
    than that.
    """
    return (
        asked
        if given in shipped()
        else choose_weights(Path(given), asked, stored_weights(Path(given)))
    )


def weights_dtype(asked: str, config: Mapping[str, Any]) -> jnp.dtype:
    """Of weights that are not quantized, and of activations: --weights, if it names one.

    Else what config.json says the checkpoint is stored in, as it would be loaded.
    """
    if asked in DTYPES:
        return jnp.dtype(DTYPES[asked])
    stored = config.get("dtype") or config.get("torch_dtype")
    if stored == "float16":  # is loaded as bfloat16
        stored = "bfloat16"
    if stored is None:
        raise ConfigError(
            f"config.json does not say its dtype; give --weights ({', '.join(DTYPES)})"
        )
    return _served("config.json: dtype", str(stored))


def weights_form(asked: str) -> QuantScheme | None:
    """--weights, where it asks for quantized ones. ConfigError for what is not served."""
    if asked not in ("auto", *DTYPES, *SCHEMES, *(name + HEAD for name in SCHEMES)):
        raise ConfigError(
            f"--weights {asked}: is not served; choose one of auto, "
            f"{', '.join((*DTYPES, *SCHEMES))}"
        )
    return None if asked in DTYPES else parse_scheme(asked)


def _served(flag: str, name: str) -> jnp.dtype:
    if name not in DTYPES:
        raise ConfigError(f"{flag} {name}: is not served yet; choose one of {', '.join(DTYPES)}")
    return jnp.dtype(DTYPES[name])
