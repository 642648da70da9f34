"""Compilation on threads of its own, with a compiler that the test turns."""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.background import THREAD, BackgroundCompiler, compiles_here
from jaxserve.engine.device.compile_counter import CompileCounter
from jaxserve.engine.device.short_turns import TURN_SECONDS, ShortTurns

BUCKETS = [Bucket("prefill", 4, tokens) for tokens in (16, 32, 64, 128)]
LONG = 60.0  # seconds, for what happens at once


class Compiler:
    """A compiler whose compiles end when they are told to."""

    def __init__(self, threads: int = 1) -> None:
        self.begun: list[Bucket] = []
        self.changed = threading.Condition()
        self.allowed = 0
        self.told: list[tuple[Bucket, bool]] = []
        self.background = BackgroundCompiler(self.compile, CompileCounter(), threads)

    def compile(self, bucket: Bucket) -> Any:
        with self.changed:
            self.begun.append(bucket)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.allowed > 0, LONG)
            self.allowed -= 1
        if bucket == BUCKETS[2]:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return f"step of {bucket.tokens}"

    def on_end(self, bucket: Bucket, is_compiled: bool) -> None:
        with self.changed:
            self.told.append((bucket, is_compiled))
            self.changed.notify_all()

    def finish(self, count: int) -> None:
        """Let so many more compiles end, and wait until they have."""
        with self.changed:
            self.allowed += count
            self.changed.notify_all()
            told = len(self.told) + count
            assert self.changed.wait_for(lambda: len(self.told) >= told, LONG)

    def wait_for_begun(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= count, LONG)


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    compiler = Compiler()
    yield compiler
    compiler.background.close()
    with compiler.changed:
        compiler.allowed = 99
        compiler.changed.notify_all()


def test_buckets_come_in_the_order_asked_and_are_taken_once(compiler: Compiler) -> None:
    background = compiler.background
    background.ask([BUCKETS[1], BUCKETS[0]], compiler.on_end)
    background.ask([BUCKETS[0], BUCKETS[3]], compiler.on_end)  # one is asked for already
    assert all(map(background.expects, (BUCKETS[0], BUCKETS[1], BUCKETS[3])))
    assert not background.expects(BUCKETS[2]) and background.take() == {}
    compiler.finish(1)
    assert background.take() == {BUCKETS[1]: "step of 32"}
    compiler.finish(2)
    assert background.expects(BUCKETS[0])  # compiled, and not taken
    assert background.take() == {BUCKETS[0]: "step of 16", BUCKETS[3]: "step of 128"}
    assert background.take() == {} and not any(map(background.expects, BUCKETS))
    assert compiler.begun == [BUCKETS[1], BUCKETS[0], BUCKETS[3]]


def test_no_more_compiles_at_a_time_than_threads() -> None:
    compiler = Compiler(threads=2)
    compiler.background.ask(BUCKETS[:2] + BUCKETS[3:], compiler.on_end)
    compiler.wait_for_begun(2)
    assert compiler.begun == BUCKETS[:2] and compiler.background.busy
    compiler.finish(3)
    assert len(compiler.background.take()) == 3 and not compiler.background.busy


def test_a_compile_that_fails_is_named_and_the_others_come(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.background.ask(BUCKETS[2:], compiler.on_end)
    with caplog.at_level(logging.WARNING, "jaxserve.engine"):
        compiler.finish(2)
    assert "prefill[4x64] was not compiled, so larger steps go on in its place: RES" in caplog.text
    assert compiler.told == [(BUCKETS[2], False), (BUCKETS[3], True)]
    assert list(compiler.background.take()) == [BUCKETS[3]]
    assert not compiler.background.expects(BUCKETS[2])


def test_a_pause_waits_for_the_compile_that_runs_and_begins_no_other(compiler: Compiler) -> None:
    background = compiler.background
    background.ask(BUCKETS[:2], compiler.on_end)
    compiler.wait_for_begun(1)
    paused = threading.Event()
    go_on = threading.Event()

    def pause() -> None:
        with background.paused():
            paused.set()
            go_on.wait(LONG)

    thread = threading.Thread(target=pause)
    thread.start()
    assert not paused.is_set()
    compiler.finish(1)
    assert paused.wait(LONG)
    assert compiler.begun == BUCKETS[:1] and not background.busy
    go_on.set()
    thread.join()
    compiler.finish(1)
    assert list(background.take()) == BUCKETS[:2]


def test_what_is_forgotten_or_closed_is_not_begun(compiler: Compiler) -> None:
    background = compiler.background
    background.ask(BUCKETS[:2], compiler.on_end)
    compiler.wait_for_begun(1)
    background.ask(BUCKETS[2:], compiler.on_end)
    background.forget(BUCKETS[2:3])
    assert not background.expects(BUCKETS[2]) and background.expects(BUCKETS[3])
    background.forget()
    compiler.finish(1)
    assert list(background.take()) == BUCKETS[:1]
    background.ask(BUCKETS[1:2], compiler.on_end)  # not known any more: it is compiled now
    compiler.wait_for_begun(2)
    background.close()
    compiler.finish(1)
    background.ask(BUCKETS[3:], compiler.on_end)
    assert background.take() == {} and not any(map(background.expects, BUCKETS))
    assert compiler.begun == BUCKETS[:2]


def test_the_threads_are_waited_for_whoever_asks(compiler: Compiler) -> None:
    """Python ends without waiting for daemons, and would do so under the compiler."""
    asking = threading.Thread(
        target=lambda: compiler.background.ask(BUCKETS[:1], compiler.on_end), daemon=True
    )
    asking.start()
    asking.join()
    compiler.wait_for_begun(1)
    (thread,) = (each for each in threading.enumerate() if each.name == "compile")
    assert not thread.daemon
    compiler.finish(1)


def test_without_a_thread_nothing_is_compiled_and_nothing_fails(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As at the end of Python, or where the system has no thread left."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        compiler.background.ask(BUCKETS[:1], compiler.on_end)
    assert "no thread to compile steps on, larger steps serve: can't start" in caplog.text
    assert compiler.told == [(BUCKETS[0], False)] and not compiler.background.expects(BUCKETS[0])
    compiler.background.ask(BUCKETS[:1], compiler.on_end)
    compiler.finish(1)
    assert list(compiler.background.take()) == BUCKETS[:1]


def test_a_pause_that_is_interrupted_is_over(compiler: Compiler) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    compiler.background.ask(BUCKETS[:2], compiler.on_end)
    compiler.wait_for_begun(1)
    with pytest.raises(KeyboardInterrupt), compiler.background.paused(interrupted):
        raise AssertionError("a compile runs")
    compiler.finish(2)
    assert list(compiler.background.take()) == BUCKETS[:2]


def test_each_bucket_is_compiled_in_its_context_and_in_short_turns(compiler: Compiler) -> None:
    usual = sys.getswitchinterval()
    found: list[tuple[bool, float]] = []

    @contextmanager
    def around() -> Iterator[None]:
        found.append((compiles_here(), sys.getswitchinterval()))
        yield

    compiler.background.ask(BUCKETS[:2], compiler.on_end, around)
    compiler.finish(2)
    assert found == [(True, pytest.approx(TURN_SECONDS))] * 2 and not compiles_here()
    wait_for_end_of_threads()
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_turns_are_short_until_the_last_block_ends() -> None:
    usual = sys.getswitchinterval()
    turns = ShortTurns()
    with turns.taken():
        with turns.taken():
            pass
        assert sys.getswitchinterval() == pytest.approx(TURN_SECONDS)
    assert sys.getswitchinterval() == pytest.approx(usual)


def wait_for_end_of_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(LONG)


def test_compiles_are_counted_by_the_thread_that_makes_them() -> None:
    counter = CompileCounter()
    background = BackgroundCompiler(compile_function, counter, threads=1)
    done = threading.Event()
    with counter.watching():
        background.ask(BUCKETS[:1], lambda *_: done.set())
        assert done.wait(LONG)
        assert (counter.watched, background.count) == (0, 1)
        compile_function(BUCKETS[1])
    compile_function(BUCKETS[3])
    assert (counter.watched, background.count) == (1, 1)
    counter.close()


def test_a_thread_is_watched_for_good() -> None:
    counter = CompileCounter()

    def work() -> None:
        counter.watch_thread()
        with counter.watching():
            compile_function(BUCKETS[0])
        compile_function(BUCKETS[1])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    compile_function(BUCKETS[3])
    assert counter.watched == 2
    counter.close()


def compile_function(bucket: Bucket) -> Any:
    """Compile a function that no other call compiles."""
    salt = float(np.random.default_rng().random())
    return jax.jit(lambda x: x * salt + bucket.tokens).lower(np.ones(8, np.float32)).compile()
