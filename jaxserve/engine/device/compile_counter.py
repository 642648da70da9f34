"""Count of what the process compiles, so that "ready means compiled" can be checked."""

import jax.monitoring

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
HIT_EVENT = "/jax/compilation_cache/cache_hits"


class CompileCounter:
    """Counter of all compiles of the process until `close`, those of eager jnp calls included.

    hits: compiles that the persistent cache answered; `count` includes them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.hits = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_compile)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_compile(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT:
            self.count += 1

    def _on_event(self, event: str, **_: str | int) -> None:
        if event == HIT_EVENT:
            self.hits += 1

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._on_compile)
        jax.monitoring.unregister_event_listener(self._on_event)
