"""When a server is ready, as --ready-when says and by the engine and its devices."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from rich.console import Console

from jaxserve.compilation_cache import has_record, keep_record
from jaxserve.server import model_steps
from jaxserve.server.model_steps import ModelSteps


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
    bundled: bool = False,
    key: str = "a",
) -> str:
    config = SimpleNamespace(deterministic=deterministic)
    llm: Any = SimpleNamespace(
        model=SimpleNamespace(mesh=None), runner=SimpleNamespace(config=config)
    )
    monkeypatch.setattr(model_steps, "platform", lambda mesh: platform)
    monkeypatch.setattr(model_steps, "spans_hosts", lambda mesh: hosts)
    monkeypatch.setattr(ModelSteps, "_key", key)
    return ModelSteps(llm, chosen, bundled, Console())._ready_when


def test_first_is_the_default(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for platform in ("cpu", "tpu"):
        assert ready_when(monkeypatch, platform=platform) == "first"
        assert ready_when(monkeypatch, "all", platform=platform) == "all"


def test_pods_and_deterministic_engines_wait_for_all(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    for case in ({"hosts": True}, {"deterministic": True}):
        assert ready_when(monkeypatch, **case) == "all"
        assert ready_when(monkeypatch, "first", **case) == "first"


def test_a_gpu_waits_for_all_until_all_were_compiled_there(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    assert ready_when(monkeypatch, platform="gpu") == "all"
    assert ready_when(monkeypatch, platform="gpu", bundled=True) == "first"
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
