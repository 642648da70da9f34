"""When a server is ready, as --ready-when says and by the engine and its devices."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from rich.console import Console

from jaxserve import llm_warm_up
from jaxserve.compilation_cache import KeptSteps, has_record, keep_record
from jaxserve.errors import ConfigError
from jaxserve.llm_warm_up import WarmUp
from jaxserve.server.model_steps import ModelSteps

pytestmark = pytest.mark.steps_come


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def ready_when(
    monkeypatch: pytest.MonkeyPatch,
    chosen: str | None = None,
    platform: str = "cpu",
    hosts: bool = False,
    deterministic: bool = False,
    key: str = "a",
) -> str:
    config: Any = SimpleNamespace(deterministic=deterministic, lanes=1, max_batch=1)
    runner: Any = SimpleNamespace(config=config, mesh=None)
    nothing: Any = None
    kept = KeptSteps(None)
    steps = WarmUp(nothing, nothing, runner, nothing, kept, nothing, nothing)
    llm: Any = SimpleNamespace(runner=runner, steps=steps)
    monkeypatch.setattr(llm_warm_up, "platform", lambda mesh: platform)
    monkeypatch.setattr(llm_warm_up, "spans_hosts", lambda mesh: hosts)
    monkeypatch.setattr(WarmUp, "_key", key)
    return ModelSteps(llm, chosen, False, Console())._ready_when


def test_first_is_the_default(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for platform in ("cpu", "tpu"):
        assert ready_when(monkeypatch, platform=platform) == "first"
        assert ready_when(monkeypatch, "all", platform=platform) == "all"


def test_pods_and_deterministic_engines_wait_for_all(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    assert ready_when(monkeypatch, hosts=True) == "all"
    assert ready_when(monkeypatch, "first", hosts=True) == "first"
    assert ready_when(monkeypatch, deterministic=True) == "all"
    with pytest.raises(ConfigError, match="--ready-when is first; with --deterministic no text"):
        ready_when(monkeypatch, "first", deterministic=True)


def test_a_gpu_waits_for_all_until_all_were_compiled_there(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    assert ready_when(monkeypatch, platform="gpu") == "all"
    keep_record("a")
    assert ready_when(monkeypatch, platform="gpu") == "first"
    assert ready_when(monkeypatch, platform="gpu", key="b") == "all"


def test_records_need_a_folder_that_can_be_written(folder: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", None)
    keep_record("a")
    assert not has_record("a")
    jax.config.update("jax_compilation_cache_dir", str(folder / "none"))
    keep_record("a")
    assert not has_record("a")
