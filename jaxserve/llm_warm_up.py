"""Steps of an LLM, compiled and measured when the first prompts need them."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from jaxserve.call_guard import CallGuard
from jaxserve.compilation_cache import compiled_steps_kept
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.executables import Progress
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.engine.request_limits import max_new_tokens
from jaxserve.engine.step_costs import measure
from jaxserve.progress import Bar
from jaxserve.prompts import Prepared


class WarmUp:
    """Compiles steps, and measures them where tokens are drafted. The guard is held meanwhile.

    Args:
        engine: Engine that gets the costs of steps.
        runner: Runner that compiles.
        guard: Guard of the LLM's calls, which lets a Ctrl-C take effect between two steps.
        cache: Folder that keeps the compiled steps; None keeps them elsewhere, or nowhere.
        new_bar: Function that makes the bar of one run of the compiler.
        progress: Function told of the progress instead of the bar.
    """

    def __init__(
        self,
        engine: Engine,
        runner: DeviceRunner,
        guard: CallGuard,
        cache: Path | None,
        new_bar: Callable[[], Bar],
        progress: Progress | None,
    ):
        self._engine = engine
        self._runner = runner
        self._guard = guard
        self._cache = cache
        self._new_bar = new_bar
        self._progress = progress
        self._measured: tuple[Bucket, ...] = ()

    def compile_for(self, prompts: Sequence[Prepared] | None) -> None:
        """Compile the steps that prompts need; None is every step there is."""
        with self._guard:
            self._engine.check_usable()
            if prompts is None:
                self._compile(self._runner.buckets.buckets)
            else:
                self._compile(self._needed(prompts) if prompts else ())

    def _needed(self, prompts: Sequence[Prepared]) -> Iterable[Bucket]:
        config = self._runner.config
        sizes = [
            (len(p.request.prompt), max_new_tokens(config, p.request))
            for p in prompts
            for _ in range(p.request.params.n)
        ]
        score = any(p.request.params.prompt_logprobs is not None for p in prompts)
        forced = any(p.request.grammar for p in prompts)
        return self._runner.buckets.reachable(sizes, config=config, score=score, forced=forced)

    def _compile(self, buckets: Iterable[Bucket]) -> None:
        """Compile these steps unless they are compiled, and measure what is new."""
        buckets = tuple(buckets)
        if not self._runner.executables.has(buckets):
            with compiled_steps_kept(self._cache), self._new_bar() as bar:
                self._runner.warm_up(buckets, self._told(self._progress or bar.update))
        self.measure()

    def _told(self, progress: Progress) -> Progress:
        """Return a function that tells of the progress, and lets a Ctrl-C take effect."""

        def told(done: int, total: int, what: str) -> None:
            self._guard.pass_on()
            progress(done, total, what)

        return told

    def measure(self) -> None:
        """Measure the compiled steps, unless none were compiled since the last call."""
        with self._guard:
            compiled = self._runner.compiled
            if self._engine.speculates and compiled != self._measured:
                config = self._runner.config
                costs = measure(self._runner, compiled, config.lanes, no_row=config.max_batch)
                self._engine.set_step_costs(costs)
                self._measured = compiled
