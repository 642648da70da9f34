"""Compilation of an engine's steps on threads of its own, while the engine runs."""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import jax

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.compile_counter import CompileCounter
from jaxserve.engine.device.short_turns import SHORT_TURNS

CORES_PER_COMPILE = 4  # the compiler uses about two at a time, and steps need some as well
# At a time, for one engine; lowering holds the GIL, so more would only hold up the engine.
MOST_COMPILES = 4
THREAD = "compile"  # name of the threads
LOWERING = "lower"  # name, up to an underscore, of the thread that lowers ahead of a warm-up
WAIT = 0.1  # seconds between two looks at what else has happened
log = logging.getLogger("jaxserve.engine")

Compile = Callable[[Bucket], jax.stages.Compiled]
OnEnd = Callable[[Bucket, bool], None]  # given whether the bucket was compiled
Around = Callable[[], AbstractContextManager[object]]


def compiles_here() -> bool:
    """Return whether the calling thread is one that lowers or compiles steps beside others.

    Such a thread may run the finalizer of anything, and may then wait for nothing that waits for a
    step.
    """
    return threading.current_thread().name.partition("_")[0] in (THREAD, LOWERING)


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
        self._around: Around = nullcontext
        self._count = 0

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
        around: Around | None = None,
    ) -> None:
        """Compile these buckets behind those that were asked for before, and return at once.

        Args:
            on_end: Function called with each bucket whose compile has ended, and whether it can be
                taken, on the thread that has compiled it; it must not block. Where the system has
                no thread for this, on the calling one.
            around: Function that makes the context in which a bucket is compiled; it must not wait.
        """
        with self._changed:
            if self._closed:
                return
            known = {*self._asked, *self._running, *self._done}
            self._asked += [bucket for bucket in buckets if bucket not in known]
            self._on_end = on_end or _ignore
            self._around = around or nullcontext
            dropped = self._start_threads()
        for bucket in dropped:
            self._on_end(bucket, False)

    def forget(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Drop these buckets, or all, as far as their compiles have not begun."""
        with self._changed:
            dropped = set(self._asked if buckets is None else buckets)
            self._asked = deque(bucket for bucket in self._asked if bucket not in dropped)

    def expects(self, bucket: Bucket) -> bool:
        """Return whether the bucket was asked for and can be taken now or later."""
        with self._changed:
            return bucket in self._asked or bucket in self._running or bucket in self._done

    def take(self) -> dict[Bucket, jax.stages.Compiled]:
        """Return what was compiled since the last call."""
        if not self._done:  # without the lock: this is asked before every launch
            return {}
        with self._changed:
            done = self._done
            self._done = {}
            return done

    @contextmanager
    def paused(self, while_waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Wait until no compile runs, and begin none inside.

        Args:
            while_waiting: Function called from time to time until then; its exception ends the
                pause.
        """
        with self._changed:
            self._paused += 1
        try:
            while self.busy:
                with self._changed:
                    self._changed.wait_for(lambda: not self._running, WAIT)
                while_waiting()
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

    def _start_threads(self) -> list[Bucket]:
        """Start as many threads as there is work for; return what no thread will compile."""
        wanted = min(self._threads, len(self._asked))
        try:
            for _ in range(wanted - self._alive):
                # No daemon, whoever starts it: Python may not end under the compiler.
                threading.Thread(target=self._run, name=THREAD, daemon=False).start()
                self._alive += 1
        except RuntimeError as error:
            log.warning("no thread to compile steps on, larger steps serve: %s", error)
        dropped = [] if self._alive else list(self._asked)
        for bucket in dropped:
            self._asked.remove(bucket)
        return dropped

    def _run(self) -> None:
        try:
            while bucket := self._next():
                self._compile_one(bucket)
        except BaseException:
            with self._changed:
                self._alive -= 1
            raise

    def _compile_one(self, bucket: Bucket) -> None:
        before = self._compiles.here.total
        compiled = None
        try:
            compiled = self._try(bucket)
        finally:
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
                self._alive -= 1  # together with the look at the queue, into which more may come
                return None
            bucket = self._asked.popleft()
            self._running.add(bucket)
            return bucket

    def _try(self, bucket: Bucket) -> jax.stages.Compiled | None:
        try:
            with SHORT_TURNS.taken(), self._around():
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
