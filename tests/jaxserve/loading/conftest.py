"""Converted folders that several test files use."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxserve.loading.convert import to_orbax
from tests.jaxserve.loading.convert_harness import GOLDEN, SMALL_CHUNKS, silent


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a golden case to its Orbax folder, which is made once."""
    folder = tmp_path_factory.mktemp("orbax")
    made = dict[str, Path]()

    def of(case: str) -> Path:
        if case not in made:
            to_orbax(GOLDEN / case, folder / case, silent, SMALL_CHUNKS)
            made[case] = folder / case
        return made[case]

    return of


@pytest.fixture
def spoiled(converted: Callable[[str], Path], tmp_path: Path) -> Path:
    """Copy a converted folder, for tests that damage it."""
    shutil.copytree(converted("llama_tied"), tmp_path / "spoiled")
    return tmp_path / "spoiled"
