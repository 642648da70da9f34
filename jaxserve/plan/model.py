"""Model of a plan: the config.json of a checkpoint, or one that ships with the planner."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from checkpoints.safetensors_reader import parse_json_object
from jaxserve.errors import ConfigError, ModelError, flag_text
from jaxserve.loading.orbax_layout import choose_weights, stored_weights
from jaxserve.loading.parameters import DTYPES
from jaxserve.models.quant import HEAD, SCHEMES, QuantScheme, parse_scheme

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


def weights_of(given: str, asked: str) -> str:
    """Return the value of --weights; auto is what a converted folder holds.

    Raises ModelError if a converted folder holds other weights.
    """
    if given in shipped():
        return asked
    return choose_weights(Path(given), asked, stored_weights(Path(given)))


def weights_dtype(asked: str, config: Mapping[str, Any]) -> jnp.dtype:
    """Return the dtype of activations, and of weights that are not quantized.

    The value of --weights if it is a dtype, otherwise the dtype of config.json.
    """
    if asked in DTYPES:
        return jnp.dtype(DTYPES[asked])
    stored = config.get("dtype") or config.get("torch_dtype")
    if stored == "float16":  # the loader makes bfloat16 of it
        stored = "bfloat16"
    if stored is None:
        raise ConfigError(
            f"config.json does not say its dtype; give --weights ({', '.join(DTYPES)})"
        )
    return _served(str(stored))


def weights_form(asked: str) -> QuantScheme | None:
    """Return the form of quantized weights that --weights asks for; None if it asks for none.

    Raises ConfigError for a value that is not served.
    """
    if asked not in ("auto", *DTYPES, *SCHEMES, *(name + HEAD for name in SCHEMES)):
        raise ConfigError(
            flag_text("--weights", asked, f"choose one of auto, {', '.join((*DTYPES, *SCHEMES))}")
        )
    return None if asked in DTYPES else parse_scheme(asked)


def _served(name: str) -> jnp.dtype:
    if name not in DTYPES:
        raise ConfigError(
            f"config.json: dtype is {name}, which is not served yet; give --weights as one of "
            f"{', '.join(DTYPES)}"
        )
    return jnp.dtype(DTYPES[name])
