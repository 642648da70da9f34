"""Precision of a plan's model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxserve.errors import ConfigError
from jaxserve.flag_errors import flag_error
from jaxserve.loading.load_plan import DTYPES, choose_scheme
from jaxserve.loading.spec import declared_dtype, stored_scheme
from jaxserve.models.precision import HEAD
from jaxserve.models.quant import SCHEMES, QuantScheme, parse_scheme
from jaxserve.plan.model_config import shipped


def weights_of(given: str, asked: str) -> str:
    """Return the value of --weights; auto is what a converted folder holds.

    Raises ModelError if a converted folder holds other weights.
    """
    folder = Path(given)
    stored = None if given in shipped() else stored_scheme(folder)
    return str(choose_scheme(folder, asked, stored)) if stored else asked


def weights_dtype(asked: str, config: Mapping[str, Any]) -> jnp.dtype:
    """Return the dtype of activations, and of weights that are not quantized.

    The value of --weights if it is a dtype, otherwise the dtype of config.json.
    """
    if asked in DTYPES:
        return jnp.dtype(DTYPES[asked])
    name = declared_dtype(config)
    if name == "float16":  # the loader makes bfloat16 of it
        name = "bfloat16"
    if name is None:
        raise ConfigError(
            f"config.json does not say its dtype; give --weights ({', '.join(DTYPES)})"
        )
    if name not in DTYPES:
        raise ConfigError(
            f"config.json: dtype is {name}, which is not served yet; give --weights as one of "
            f"{', '.join(DTYPES)}"
        )
    return jnp.dtype(DTYPES[name])


def weights_scheme(asked: str) -> QuantScheme | None:
    """Return the quantization scheme that --weights asks for; None if it asks for none.

    Raises ConfigError for a value that is not served.
    """
    if asked not in ("auto", *DTYPES, *SCHEMES, *(name + HEAD for name in SCHEMES)):
        raise flag_error(
            "--weights", asked, f"choose one of auto, {', '.join((*DTYPES, *SCHEMES))}"
        )
    return None if asked in DTYPES else parse_scheme(asked)
