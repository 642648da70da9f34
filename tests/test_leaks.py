"""Tests that leave something behind are reported, and those that do not are not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = """
import pytest, sys
from tests.leaks import LeakReporter
options = ["-q", "-s", "-p", "no:randomly", "--noconftest", sys.argv[1]]
sys.exit(pytest.main(options, plugins=[LeakReporter(0.1)]))
"""
LEAKING = """
import socket, subprocess, sys, threading
import pytest

KEPT = []
GO = threading.Event()

def test_socket():
    KEPT.append(socket.socket())

def test_thread():
    threading.Thread(target=GO.wait, name="waiter", daemon=True).start()

def test_process():
    KEPT.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_file():
    KEPT.append(open("/dev/null"))

def test_garbage():
    cycle = [socket.socket()]
    cycle.append(cycle)

def test_tidy(tmp_path):
    socket.socket().close()
    subprocess.run([sys.executable, "-c", "pass"])

@pytest.fixture(scope="module")
def shared():
    opened = []
    yield opened
    for each in opened[1:]:
        each.close()

def test_opens_two(shared):
    shared += [open("/dev/zero"), open("/dev/null")]

def test_last(shared):
    KEPT.extend(shared)
"""


@pytest.mark.system
def test_what_a_test_leaves_open_is_reported(tmp_path: Path) -> None:
    (tmp_path / "test_leaking.py").write_text(LEAKING)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "test_leaking.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    found = dict(re.findall(r"ERROR at teardown of (\w+) _*\nnot closed: (.*)", done.stdout))
    expected = {
        "test_socket": r"file descriptor of socket:\[\d+\] \(test_socket\)",
        "test_thread": r"thread waiter \(test_thread\)",
        "test_process": r"process \S+python\S* -c input\(\) .*\(test_process\).*pipe.*",
        "test_file": r"file descriptor of /dev/null \(test_file\)",
        "test_garbage": r"unclosed <socket.socket .*>",
        "test_last": r"file descriptor of /dev/zero \(test_opens_two\)",
    }
    assert found.keys() == expected.keys(), done.stdout
    for name, pattern in expected.items():
        assert re.fullmatch(pattern, found[name]), found[name]
