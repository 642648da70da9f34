"""Count of what the process compiles, so that "ready means compiled" can be checked."""

import weakref
from contextlib import suppress

import jax.monitoring

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
HIT_EVENT = "/jax/compilation_cache/cache_hits"


class CompileCounter:
    """Counter of all compiles of the process, those of eager jnp calls included.

    It counts until `close`, or until nothing refers to it any more.
    """

    def __init__(self) -> None:
        # jax holds the listener, so the listener does not hold this object.
        self._seen = _Listener()
        jax.monitoring.register_event_duration_secs_listener(self._seen.on_compile)
        jax.monitoring.register_event_listener(self._seen.on_event)
        self._closing = weakref.finalize(self, self._seen.unregister)

    @property
    def count(self) -> int:
        """Number of compiles, with those that the persistent cache answered."""
        return self._seen.compiles

    @property
    def hits(self) -> int:
        """Number of compiles that the persistent cache answered."""
        return self._seen.hits

    def close(self) -> None:
        """Stop counting; closing again does nothing."""
        self._closing()


class _Listener:
    def __init__(self) -> None:
        self.compiles = 0
        self.hits = 0

    def on_compile(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT:
            self.compiles += 1

    def on_event(self, event: str, **_: str | int) -> None:
        if event == HIT_EVENT:
            self.hits += 1

    def unregister(self) -> None:
        with suppress(AssertionError):  # the program has cleared all listeners
            jax.monitoring.unregister_event_duration_listener(self.on_compile)
            jax.monitoring.unregister_event_listener(self.on_event)
