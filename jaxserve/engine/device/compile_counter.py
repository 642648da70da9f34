"""Counts of what the process compiles, by thread, so that "no request waits" can be checked."""

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import get_ident

import jax.monitoring

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
HIT_EVENT = "/jax/compilation_cache/cache_hits"


@dataclass(slots=True)
class Compiles:
    """Compiles of one thread, those of eager jnp calls included."""

    total: int = 0  # with those that the persistent cache answered
    hits: int = 0  # that the persistent cache answered


class CompileCounter:
    """Counter of compiles by the thread that makes them, and of those in watched blocks.

    It counts until `close`, or until nothing refers to it any more.
    """

    def __init__(self) -> None:
        # jax holds the listener, so the listener does not hold this object.
        self._seen = _Listener()
        jax.monitoring.register_event_duration_secs_listener(self._seen.on_compile)
        jax.monitoring.register_event_listener(self._seen.on_event)
        self._closing = weakref.finalize(self, self._seen.unregister)

    @property
    def here(self) -> Compiles:
        """Compiles of the calling thread so far."""
        return self._seen.by_thread[get_ident()]

    @property
    def watched(self) -> int:
        """Number of compiles in watched blocks, with those that the persistent cache answered."""
        return self._seen.watched

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what this thread compiles inside, where every compile makes a request wait."""
        thread = get_ident()
        if thread in self._seen.watched_threads:  # an outer block counts
            yield
            return
        self._seen.watched_threads.add(thread)
        try:
            yield
        finally:
            self._seen.watched_threads.discard(thread)

    def watch_thread(self) -> None:
        """Count what this thread compiles from now on, as in a watched block."""
        self._seen.watched_threads.add(get_ident())

    def close(self) -> None:
        """Stop counting; closing again does nothing."""
        self._closing()


class _Listener:
    """Listener of jax's events, which come on the thread that compiles."""

    def __init__(self) -> None:
        self.by_thread: defaultdict[int, Compiles] = defaultdict(Compiles)
        self.watched_threads: set[int] = set()
        self.watched = 0

    def on_compile(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event != COMPILE_EVENT:
            return
        thread = get_ident()
        self.by_thread[thread].total += 1
        self.watched += thread in self.watched_threads

    def on_event(self, event: str, **_: str | int) -> None:
        if event == HIT_EVENT:
            self.by_thread[get_ident()].hits += 1

    def unregister(self) -> None:
        with suppress(AssertionError):  # the program has cleared all listeners
            jax.monitoring.unregister_event_duration_listener(self.on_compile)
            jax.monitoring.unregister_event_listener(self.on_event)
