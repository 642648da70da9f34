"""Counts what the process compiles, so that "ready means compiled" is a number."""

import jax.monitoring

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts every compile of the process from its creation until `close`, an eager jnp call's included."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == COMPILE_EVENT

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)
