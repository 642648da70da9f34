"""The strict world that every test runs in: 8 CPU devices, no silent promotion of dtypes or
ranks."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, settings
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.compilation_cache import share_compiled
from jaxserve.llm_warm_up import WarmUp
from jaxserve.loading import product_rows
from tests.compiled_steps import BYTES, compiled_steps_folder
from tests.leaks import LeakReporter
from tests.outcome_tables import FAMILIES_ON_MESHES, FEATURE_PAIRS, OutcomeTable

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# A shell's background job ignores Ctrl-C, and so does what it starts. Tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Engines of the same shape are built by many tests, in several processes and in every run: each
# step is compiled once.
CACHE = compiled_steps_folder()
# A machine may stall for seconds.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


# By which an LLM decides whether steps come while its calls run.
COMPILES_ALL_FIRST = WarmUp.__dict__["compiles_all_first"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--support-matrix",
        type=Path,
        metavar="FILE",
        help="write which families passed on which meshes",
    )
    parser.addoption(
        "--feature-pairs", type=Path, metavar="FILE", help="write which pairs of features passed"
    )
    parser.addoption(
        "--write-streams", action="store_true", help="write tests/golden/agent_streams anew"
    )
    parser.addoption(
        "--page-picture", type=Path, metavar="FILE", help="write what the server's page looks like"
    )
    parser.addoption(
        "--lm-eval",
        type=Path,
        metavar="FILE",
        help="the program lm_eval, in an environment with torch",
    )
    parser.addoption(
        "--rerun-system",
        action="store_true",
        help="try a test marked `system` a second time when it fails, and name it at the end",
    )


def pytest_configure(config: pytest.Config) -> None:
    share_steps()
    # The libraries of a GPU keep files open from their first use on.
    if "cuda" not in os.environ.get("JAX_PLATFORMS", ""):
        config.pluginmanager.register(LeakReporter())
    for option, place in (
        ("--support-matrix", FAMILIES_ON_MESHES),
        ("--feature-pairs", FEATURE_PAIRS),
    ):
        if path := config.getoption(option):
            config.pluginmanager.register(OutcomeTable(path, place))


def share_steps() -> None:
    share_compiled(CACHE)
    jax.config.update("jax_compilation_cache_max_size", BYTES)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--rerun-system"):
        for item in items:
            if item.get_closest_marker("system"):
                item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Share compiled steps again after a test of a command that leaves the cache otherwise.

    `jaxserve plan` switches the cache off for its process; here, others go on in it.
    """
    shared = jax.config.jax_enable_compilation_cache
    if shared and jax.config.jax_compilation_cache_dir == str(CACHE):
        return
    jax.config.update("jax_enable_compilation_cache", True)
    share_steps()
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Real inputs that nobody here wrote; tests that need them are skipped without."""
    folder = os.environ.get("JAXSERVE_TEST_DATA")
    if not folder:
        pytest.skip("JAXSERVE_TEST_DATA is not set")
    return Path(folder)


@pytest.fixture(scope="session", autouse=True)
def steps_are_there() -> Iterator[None]:
    """Let every LLM compile the steps of a call before it: which ones run would depend on time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WarmUp, "compiles_all_first", True)
        yield


@pytest.fixture(scope="session", autouse=True)
def rows_are_as_committed() -> Iterator[None]:
    """Let no load measure how many rows a CPU's kernel multiplies: bits would depend on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product_rows, "LEAST_BYTES", sys.maxsize)
        yield


@pytest.fixture(autouse=True)
def steps_that_come(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps come while calls run, as users have it, in tests of just that."""
    if request.node.get_closest_marker("steps_come"):
        monkeypatch.setattr(WarmUp, "compiles_all_first", COMPILES_ALL_FIRST)
