"""Compilers of chips that are not here: what they have to find before they are loaded."""

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from sharding.aot_devices import ENVIRONMENT


@pytest.fixture(autouse=True)
def compilers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Their variables, and no cache of compiled steps: what is for no device here cannot be read
    back.
    """
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
