"""Compilation of an engine's steps on threads of its own, while the engine runs."""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import jax

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.compile_counter import CompileCounter

CORES_PER_COMPILE = 4  # the compiler uses about two at a time, and steps need some as well
MOST_COMPILES = 4  # at a time; lowering holds the GIL, so more would only hold up the engine
log = logging.getLogger("jaxserve.engine")

Compile = Callable[[Bucket], jax.stages.Compiled]
OnEnd = Callable[[Bucket, bool], None]  # given whether the bucket was compiled


def compiles_at_once() -> int:
    """Return how many steps are compiled at a time on the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(max((cores or 1) // CORES_PER_COMPILE, 1), MOST_COMPILES)


class BackgroundCompiler:
    """Compiles buckets in the order in which they were asked for, and keeps them until taken.

    A bucket that cannot be compiled is named in the log, and larger ones go on serving its steps.
    The threads end when nothing is left to do, after `close`, and when the main thread ends: an
    interpreter that ends waits for the compiles that run, since they cannot be interrupted.

    Args:
        compile: Function that compiles a bucket, called on the threads.
        compiles: Counter of compiles.
        threads: The most compiles at a time.
    """

    def __init__(self, compile: Compile, compiles: CompileCounter, threads: int):
        self._compile = compile
        self._compiles = compiles
        self._threads = threads
        # Guards everything below.
        self._changed = threading.Condition()
        self._asked: deque[Bucket] = deque()
        self._done: dict[Bucket, jax.stages.Compiled] = {}
        self._running: set[Bucket] = set()
        self._alive = 0  # threads
        self._paused = 0  # blocks of `paused` that have begun and not ended
        self._closed = False
        self._on_end: OnEnd = _ignore
        self._count = 0

    @property
    def pending(self) -> int:
        """Number of buckets that were asked for and have not been taken yet."""
        with self._changed:
            return len(self._asked) + len(self._running) + len(self._done)

    @property
    def count(self) -> int:
        """Number of compiles on the threads, with those that the persistent cache answered."""
        return self._count

    @property
    def busy(self) -> bool:
        """Return whether a compile runs, for which the end of the process would wait."""
        with self._changed:
            return bool(self._running)

    def ask(
        self,
        buckets: Iterable[Bucket],
        on_end: OnEnd | None = None,
    ) -> None:
        """Compile these buckets behind those that were asked for before, and return at once.

        Args:
            on_end: Function called with each bucket whose compile has ended, and whether it can be
                taken, on the thread that has compiled it; it must not block.
        """
        with self._changed:
            if self._closed:
                return
            known = {*self._asked, *self._running, *self._done}
            self._asked += [bucket for bucket in buckets if bucket not in known]
            self._on_end = on_end or _ignore
            self._start_threads()

    def forget(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Drop these buckets, or all, as far as their compiles have not begun."""
        with self._changed:
            dropped = set(self._asked if buckets is None else buckets)
            self._asked = deque(bucket for bucket in self._asked if bucket not in dropped)

    def take(self) -> dict[Bucket, jax.stages.Compiled]:
        """Return what was compiled since the last call."""
        if not self._done:  # without the lock: this is asked before every launch
            return {}
        with self._changed:
            done = self._done
            self._done = {}
            return done

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait until no compile runs, and begin none inside."""
        with self._changed:
            self._paused += 1
            self._changed.wait_for(lambda: not self._running)
        try:
            yield
        finally:
            with self._changed:
                self._paused -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Begin no further compile; does not wait for those that run."""
        with self._changed:
            self._closed = True
            self._asked.clear()
            self._done.clear()
            self._changed.notify_all()

    # ---- on the threads

    def _start_threads(self) -> None:
        """Start as many threads as there is work for, or as the system allows."""
        wanted = min(self._threads, len(self._asked))
        for _ in range(wanted - self._alive):
            # No daemon, whoever starts it: Python may not end under the compiler.
            thread = threading.Thread(target=self._run, name="compile", daemon=False)
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("no thread to compile steps on, larger steps serve: %s", error)
                return
            self._alive += 1

    def _run(self) -> None:
        while bucket := self._next():
            before = self._compiles.here.total
            compiled = self._try(bucket)
            with self._changed:
                self._count += self._compiles.here.total - before
                self._running.discard(bucket)
                if compiled is not None and not self._closed:
                    self._done[bucket] = compiled
                self._changed.notify_all()
            self._on_end(bucket, compiled is not None)

    def _next(self) -> Bucket | None:
        """Return a bucket to compile, once that is allowed; None for the end of the thread."""
        with self._changed:
            while self._asked and self._paused and _main_thread_lives():
                self._changed.wait(timeout=1.0)  # nobody tells of the end of the main thread
            if not self._asked or not _main_thread_lives():
                self._alive -= 1
                return None
            bucket = self._asked.popleft()
            self._running.add(bucket)
            return bucket

    def _try(self, bucket: Bucket) -> jax.stages.Compiled | None:
        try:
            return self._compile(bucket)
        except Exception as error:
            log.warning(
                "%s was not compiled, so larger steps go on in its place: %s", bucket, error
            )
            return None


def _ignore(bucket: Bucket, is_compiled: bool) -> None:
    pass


def _main_thread_lives() -> bool:
    return threading.main_thread().is_alive()
