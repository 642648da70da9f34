"""Calls of the command line as a person would make them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from jaxserve.generate.__main__ import main

ROOT = Path(__file__).parents[2]
BUNDLED = ROOT / "checkpoints" / "bundled" / "tiny-chat-draft"
SMALL = ["--max-batch", "2", "--step-tokens", "32", "--page-size", "16", "--cache-tokens", "512"]
STORY = "Once upon a time"


Call = Callable[..., tuple[int, str, str]]


def caller(capsys: pytest.CaptureFixture[str]) -> Call:
    """Return a function that runs main() with the tests' compilation cache.

    It returns the exit code, standard output and standard error.
    """

    def run(*arguments: str, model: Path | str = BUNDLED) -> tuple[int, str, str]:
        cache = ["--compilation-cache", jax.config.jax_compilation_cache_dir]
        try:
            code = main(["--model", str(model), *SMALL, *cache, *arguments])
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def copied(folder: Path) -> Path:
    """Fill a folder with a copy of the bundled checkpoint, to spoil, and return it."""
    for path in BUNDLED.iterdir():
        shutil.copy(path, folder / path.name)
    return folder


def assert_refused(result: tuple[int, str, str], message: str) -> None:
    code, out, err = result
    assert code == 2 and out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert message in line, line
    assert "Traceback" not in err
