"""What jaxserve.ray says of a Ray that is missing or too old; its tests are in tests/cluster."""

import importlib.metadata
import sys

import pytest


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the versions that are found, instead of those of the environment."""
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.delitem(sys.modules, "jaxserve.ray", raising=False)
    return versions


def test_ray_is_missing(installed: dict[str, str]) -> None:
    missing = r"jaxserve.ray needs Ray, which is not installed \(pip install 'jaxserve\[ray\]'\)"
    with pytest.raises(ImportError, match=missing):
        importlib.import_module("jaxserve.ray")


@pytest.mark.parametrize("release", ["2.9.3", "2.64.0", "3.0.0"])
def test_ray_was_not_tested(installed: dict[str, str], release: str) -> None:
    installed["ray"] = release
    needed = rf"Ray {release} is installed; jaxserve\.ray needs 2\.60 or newer, below 2\.64 \(pip"
    with pytest.raises(ImportError, match=needed):
        importlib.import_module("jaxserve.ray")


def test_names_that_are_none(installed: dict[str, str]) -> None:
    installed["ray"] = "2.60.1"
    package = importlib.import_module("jaxserve.ray")
    assert set(package.__all__) == set(package._HOMES)
    with pytest.raises(AttributeError, match="has no attribute 'Generate'"):
        _ = package.Generate
