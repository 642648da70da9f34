"""The command `jaxserve`: it finds its programs, and says which there are."""

from importlib import import_module
from importlib.metadata import version

import pytest

import jaxserve
from jaxserve.__main__ import PROGRAMS, main


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"jaxserve {jaxserve.__version__}\n"
    assert jaxserve.__version__ == version("jaxserve")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_gets_the_other_arguments(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    module, _ = PROGRAMS[program]

    def run(arguments: list[str]) -> int:
        seen.append(arguments)
        return 7

    monkeypatch.setattr(import_module(module), "main", run)
    assert main([program, "--flag", "value"]) == 7
    assert seen == [["--flag", "value"]]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [([], "arguments are required: PROGRAM"), (["srve"], "invalid choice: 'srve'")],
)
def test_a_program_that_there_is_not(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and problem in capsys.readouterr().err
