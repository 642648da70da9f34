"""Ctrl-C while a program starts, and where Python would lose it."""

import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[3]
# Programs are interrupted at points of the code, not after a time: a slow machine changes nothing.
# SIGINT is set first, because a shell may have started the tests with SIGINT ignored.
NOT_IGNORED = "signal.default_int_handler"  # which Python installs then
IGNORED = "signal.SIG_IGN"
PREPARED = """
import os, runpy, signal, sys, weakref
signal.signal(signal.SIGINT, {inherited})

def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)

from jaxserve.interrupts import exit_on_interrupt, interrupts_raise
"""
AT_IMPORT = """
program, module = sys.argv[1:]
sys.argv[1:] = ["--prompt", "text"]

class Finder:
    def find_spec(self, name, *_):
        if name == module:
            press_ctrl_c()

sys.meta_path.insert(0, Finder())
runpy.run_module(program, run_name="__main__")
"""
IN_A_DESTRUCTOR = """
class Dropped:
    def __del__(self):
        press_ctrl_c()

exit_on_interrupt()
Dropped()
print("went on")
"""
IN_A_CALLBACK = """
class Dropped:
    pass

exit_on_interrupt()
dropped = Dropped()
reference = weakref.ref(dropped, lambda _: press_ctrl_c())
del dropped
print("went on")
"""
UNWOUND = """
exit_on_interrupt()
try:
    with interrupts_raise():
        press_ctrl_c()
except KeyboardInterrupt:
    print("unwound", flush=True)
press_ctrl_c()
print("went on")
"""


def run(script: str, *arguments: str, inherited: str = NOT_IGNORED) -> CompletedProcess[str]:
    """Run a script that has started with SIGINT ignored or not."""
    code = PREPARED.format(inherited=inherited) + script
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("program", "module"),
    [
        ("jaxserve.client", "jaxserve.client.program"),
        ("jaxserve.client", "grpc"),
        ("jaxserve.client", "jaxserve.client.flags"),
        ("jaxserve.generate", "jaxserve.cli.flags"),
        ("jaxserve.generate", "jax"),
        ("jaxserve.generate", "jaxserve.sharding.rules"),
    ],
)
def test_during_an_import(program: str, module: str) -> None:
    done = run(AT_IMPORT, program, module)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("script", [IN_A_DESTRUCTOR, IN_A_CALLBACK], ids=["destructor", "callback"])
def test_where_python_ignores_exceptions(script: str) -> None:
    done = run(script)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_code_that_has_something_to_put_back_is_unwound() -> None:
    """The block sees KeyboardInterrupt; after it, Ctrl-C ends the process at once again."""
    done = run(UNWOUND)
    assert (done.returncode, done.stdout, done.stderr) == (130, "unwound\n", "")


def test_an_ignored_signal_stays_ignored() -> None:
    """Shells without job control start background jobs with SIGINT ignored."""
    done = run(IN_A_DESTRUCTOR, inherited=IGNORED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")
