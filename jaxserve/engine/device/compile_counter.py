"""Counts what the process compiles, so that "ready means compiled" is a number."""

import jax.monitoring

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
HIT_EVENT = "/jax/compilation_cache/cache_hits"


class CompileCounter:
    """Counts every compile of the process from its creation until `close`, an eager jnp call's
    included.

    hits: how many of them were found in the persistent cache.
    """

    def __init__(self) -> None:
        self.count = self.hits = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_compile)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_compile(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == COMPILE_EVENT

    def _on_event(self, event: str, **_: str | int) -> None:
        self.hits += event == HIT_EVENT

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_compile)
        jax.monitoring.unregister_event_listener(self._on_event)
