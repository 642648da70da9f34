"""Report of what a test leaves behind: processes, threads, and open sockets, pipes and files.

A test that leaves something is reported as an error of its teardown. What a test opens for a
fixture that its module shares may stay until the module ends, and is then reported with the name of
the test that opened it.
"""

import gc
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

# What grpc.aio polls with ends when its last object is freed; a call that failed keeps one until
# after its test. Event loops have such descriptors too, and complain when they are not closed.
POLLER = ("(_poll_wrapper)", "an unnamed socket", "anon_inode:")
SHARED = ("class", "module", "package")  # scopes of fixtures
type Resources = dict[str, str]  # what is open, by a key that tells it from later ones


class LeakReporter:
    """Plugin that compares what is open before and after every test.

    patience: seconds in which what is about to end has to end.
    """

    def __init__(self, patience: float = 60.0) -> None:
        self._patience = patience
        uvloop.new_event_loop().close()  # the first one opens a pipe for signals that stays
        self._before: Resources = {}
        self._opened_by: dict[str, str] = {}  # key of a resource -> test that shares fixtures

    def pytest_collection_finish(self) -> None:
        leave_out_of_later_collections()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self._before = open_resources()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        result = yield
        # Compilers keep logs and pollers open for good, and Ray all that belongs to a driver.
        if item.get_closest_marker("deviceless") or item.get_closest_marker("cluster"):
            return result
        known = self._before
        if ends_its_module(item, nextitem):
            known = {key: text for key, text in known.items() if key not in self._opened_by}
        elif shares_fixtures(item):
            for key in opened_since(known):
                self._opened_by[key] = item.name
            return result
        left, complaints = wait_until_closed(known, self._patience)
        lines = [f"{text} ({self._opened_by.get(key, item.name)})" for key, text in left.items()]
        if ends_its_module(item, nextitem):
            self._opened_by.clear()
            leave_out_of_later_collections()
        if lines or complaints:
            pytest.fail("not closed: " + "; ".join([*lines, *complaints]), pytrace=False)
        return result


def leave_out_of_later_collections() -> None:
    """Collect garbage now, and leave what is alive out of later collections.

    Imports and jax's caches become a million objects, of which each collection would take most of a
    second. What later tests make is collected as before.
    """
    gc.collect()
    gc.freeze()


def shares_fixtures(item: pytest.Item) -> bool:
    """Return whether a test uses a fixture that other tests of its module use, too."""
    fixtures: Mapping[str, Any] = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009
    return any(each.scope in SHARED for found in fixtures.values() for each in found)


def ends_its_module(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    return nextitem is None or nextitem.path != item.path


def wait_until_closed(known: Resources, seconds: float) -> tuple[Resources, list[str]]:
    """Return what stays open, and complaints of what the garbage collector had to close.

    known: what was open before, and may be.
    """
    if not opened_since(known):
        return {}, []
    with collected_complaints() as complaints:
        gc.collect()
    until = time.monotonic() + seconds
    while True:
        found = opened_since(known)
        left = {key: text for key, text in found.items() if not is_of_a_poller(text)}
        if not left or time.monotonic() > until:
            return left, complaints
        time.sleep(0.01)


def opened_since(known: Resources) -> Resources:
    return {key: text for key, text in open_resources().items() if key not in known}


def is_of_a_poller(text: str) -> bool:
    return any(part in text for part in POLLER)


@contextmanager
def collected_complaints() -> Iterator[list[str]]:
    """Yield a list to which the errors of destructors are added, such as unclosed sockets."""
    complaints: list[str] = []
    before = sys.unraisablehook
    sys.unraisablehook = lambda problem: complaints.append(str(problem.exc_value))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            yield complaints
    finally:
        sys.unraisablehook = before


def open_resources() -> Resources:
    """Return the threads, child processes and file descriptors of this process."""
    return open_threads() | open_processes() | open_files()


def open_threads() -> Resources:
    return {
        f"thread {id(thread)}": f"thread {thread.name}"
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)  # a library's, which ran Python once
    }


def open_processes() -> Resources:
    if not has_children():
        return {}
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
            command = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended
            continue
        if parent == os.getpid():
            found[f"process {folder.name}"] = f"process {command or folder.name}"
    return found


def has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def open_files() -> Resources:
    unnamed = unnamed_sockets()
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # the descriptor of the listing itself
            continue
        what = "an unnamed socket" if target in unnamed else target
        found[f"{descriptor} {target}"] = f"file descriptor of {what}"
    return found


def unnamed_sockets() -> set[str]:
    """Return the pairs of sockets of this machine, as links of descriptors name them."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {f"socket:[{fields[6]}]" for fields in lines if len(fields) == 7}
