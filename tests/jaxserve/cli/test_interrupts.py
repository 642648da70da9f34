"""Ctrl-C while a program starts, and where Python would lose it."""

import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[3]
MODEL = ROOT / "checkpoints" / "bundled" / "tiny-chat"
# Programs are interrupted at points of the code, not after a time: a slow machine changes nothing.
# SIGINT is set first, because a shell may have started the tests with SIGINT ignored.
NOT_IGNORED = "signal.default_int_handler"  # which Python installs then
IGNORED = "signal.SIG_IGN"
PREPARED = """
import os, runpy, signal, sys, weakref
signal.signal(signal.SIGINT, {inherited})

def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)

from jaxserve.interrupts import interrupts_kept, interrupts_raise
from jaxserve.sigint import exit_on_interrupt
"""
AT_IMPORT = """
program, module = sys.argv[1:3]
del sys.argv[1:3]

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
LOST_AT_FIRST = """
import time

class Dropped:
    def __del__(self):
        press_ctrl_c()

exit_on_interrupt()
try:
    with interrupts_raise():
        Dropped()
        time.sleep(60)
        print("went on")
except KeyboardInterrupt:
    print("unwound", flush=True)
"""
AFTER_A_LOOP = """
import asyncio

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, print, "handled")
    press_ctrl_c()
    await asyncio.sleep(0.1)

exit_on_interrupt()
with interrupts_kept():
    asyncio.run(main())
sys.stdout.flush()
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
        ("jaxserve.client text", "jaxserve.client.program"),
        ("jaxserve.client text", "grpc"),
        ("jaxserve.client text", "jaxserve.client.flags"),
        ("jaxserve.generate --prompt text", "jaxserve.cli.flags"),
        ("jaxserve.generate --prompt text", "jax"),
        ("jaxserve.generate --prompt text", "jaxserve.sharding.rules"),
        ("jaxserve.serve MODEL", "argparse"),
        ("jaxserve.serve MODEL", "jax"),
        ("jaxserve serve MODEL", "jaxserve.programs"),
        ("jaxserve serve MODEL", "grpc"),
        ("jaxserve.plan MODEL", "numpy"),
        ("jaxserve.convert MODEL /nowhere/new", "jax"),
        ("jaxserve.bench startup", "jaxserve.bench.flags"),
        ("jaxserve.doctor", "jax"),
        ("checkpoints.convert MODEL /nowhere/new", "numpy"),
    ],
)
def test_during_an_import(program: str, module: str) -> None:
    name, *arguments = program.replace("MODEL", str(MODEL)).split()
    done = run(AT_IMPORT, name, module, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("script", [IN_A_DESTRUCTOR, IN_A_CALLBACK], ids=["destructor", "callback"])
def test_where_python_ignores_exceptions(script: str) -> None:
    done = run(script)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_code_that_has_something_to_put_back_is_unwound() -> None:
    """The block sees KeyboardInterrupt; after it, Ctrl-C ends the process at once again."""
    done = run(UNWOUND)
    assert (done.returncode, done.stdout, done.stderr) == (130, "unwound\n", "")


def test_what_python_drops_is_raised_again() -> None:
    """A destructor in a block that has something to put back; nothing is printed of it."""
    done = run(LOST_AT_FIRST)
    assert (done.returncode, done.stdout, done.stderr) == (0, "unwound\n", "")


def test_after_an_event_loop_the_program_ends_at_once_again() -> None:
    done = run(AFTER_A_LOOP)
    assert (done.returncode, done.stdout, done.stderr) == (130, "handled\n", "")


def test_an_ignored_signal_stays_ignored() -> None:
    """Shells without job control start background jobs with SIGINT ignored."""
    done = run(IN_A_DESTRUCTOR, inherited=IGNORED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")
