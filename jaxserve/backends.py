"""JAX's backends when they start: what goes wrong there is one line that says what to do.

Nothing here imports jax before it is asked for, which takes seconds.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jaxserve.errors import ConfigError

PLATFORMS = "JAX_PLATFORMS"  # environment variable: what jax may use; all of it must start
DOCTOR = "jaxserve doctor says what is installed"


@contextmanager
def importing_jax() -> Iterator[None]:
    """Turn what jax finds wrong in its environment variables into a ConfigError, in this block.

    jax reads them when it is imported.
    """
    try:
        yield
    except ValueError as error:
        if not _is_about_environment(str(error)):
            raise
        raise ConfigError(f"the environment: {error} (correct or unset the variable)") from error


def _is_about_environment(message: str) -> bool:
    """Return whether jax complains of a variable JAX_NAME: as such, as jax_name or as jax.name."""
    names = [name.removeprefix("JAX_") for name in os.environ if name.startswith("JAX_")]
    return any(name and name.lower() in message.lower() for name in names)


def devices() -> Sequence[Any]:
    """Return the devices that jax sees, on this host or in its pod.

    Raises ConfigError where a backend does not start, with jax's reason and what to do.
    """
    import jax

    try:
        return jax.devices()
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ConfigError(f"jax finds no devices: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    reason, advice = why_no_devices(error)
    return f"{reason} ({f'{advice}; ' if advice else ''}{DOCTOR})"


def why_no_devices(error: Exception) -> tuple[str, str]:
    """Return jax's reason why a backend does not start, and what to do about it if that is known.

    Args:
        error: What `jax.devices` has raised.
    """
    chosen = os.environ.get(PLATFORMS)
    # jax has an assertion where the plugin that a platform needs is not installed, without a text.
    reason = (str(error).strip() or "the platform's plugin is not installed").splitlines()[0]
    # jax advises to set JAX_PLATFORMS='' where the variable is the fault, and beside other faults.
    reason = reason.partition(" (set JAX_PLATFORMS=")[0].partition(" (you may need to")[0]
    if "in use" in reason:
        return reason, "end the other process"
    return reason, f"unset {PLATFORMS}={chosen}, or install what it names" if chosen else ""
