"""Environment of the compilers for absent chips."""

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.sharding.aot_devices import ENVIRONMENT


@pytest.fixture(autouse=True)
def compiler_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the compilers' variables, and switch off the cache of compiled steps.

    Executables for absent devices cannot be read back from it.
    """
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
