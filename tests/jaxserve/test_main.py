"""The command `jaxserve`: it finds its programs, and says which there are."""

import subprocess
import sys
from importlib import import_module
from importlib.metadata import version

import pytest

import jaxserve
from jaxserve.client.flags import parser as client_parser
from jaxserve.generate.flags import parser as generate_parser
from jaxserve.programs import PROGRAMS, start


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        start(["--version"])
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
    assert start([program, "--flag", "value"]) == 7
    assert seen == [["--flag", "value"]]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "arguments are required: PROGRAM"),
        (["srve"], "invalid choice: 'srve'"),
        (["--", "plan"], "is no program"),
    ],
)
def test_a_program_that_there_is_not(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        start(arguments)
    assert end.value.code == 2 and problem in capsys.readouterr().err


INTERRUPTED = """
import os, signal, sys
import jaxserve.convert
from jaxserve.__main__ import main
from jaxserve.interrupts import interrupts_raise

def convert(_):
    with interrupts_raise():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            print("put back", flush=True)

jaxserve.convert.main = convert
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[1:] = ["convert"]
main()
"""


@pytest.mark.system
def test_a_program_puts_back_what_it_has_begun_after_ctrl_c() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert done.stdout == "put back\n" and "KeyboardInterrupt" in done.stderr


def test_what_follows_two_dashes_is_no_flag() -> None:
    assert client_parser().parse_args(["--", "--foo"]).prompt == "--foo"
    assert generate_parser().parse_args(["DIR", "--", "--foo"]).texts == ["--foo"]
    assert generate_parser().parse_args(["--json", "--", "DIR", "--foo"]).texts == ["--foo"]
