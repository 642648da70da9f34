"""Steps of an LLM, compiled and measured when prompts need them."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from jaxserve.call_guard import CallGuard
from jaxserve.compilation_cache import compiled_steps_kept
from jaxserve.engine.buckets import Bucket, required
from jaxserve.engine.device.executables import Progress
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.engine.host.speculation import Costs
from jaxserve.engine.request_limits import max_new_tokens
from jaxserve.engine.step_costs import measure
from jaxserve.progress import Bar
from jaxserve.prompts import Prepared
from jaxserve.sharding.mesh import spans_hosts


class WarmUp:
    """Compiles steps, and measures them where tokens are drafted. The guard is held meanwhile.

    Args:
        engine: Engine that is told which steps there are and what they cost.
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
        self._known: set[Bucket] = set()  # steps that the engine was told of
        self._costs: dict[tuple[int, int], float] = {}

    def compile_for(self, prompts: Sequence[Prepared] | None) -> None:
        """Compile the steps that prompts need; None is every step there is."""
        with self._guard:
            self._engine.check_usable()
            if prompts is None:
                self._compile(self._runner.buckets.buckets)
            elif prompts:
                self._compile(self._needed(prompts))

    def begin(self, prompts: Sequence[Prepared]) -> None:
        """Compile the fewest steps that prompts can run with, and the others in the background.

        A deterministic engine waits for all of them, since a text may not change with what is
        compiled, and so does one on several hosts.
        """
        with self._guard:
            self._engine.check_usable()
            needed = tuple(self._needed(prompts))
            if self._runner.config.deterministic or spans_hosts(self._runner.mesh):
                self._compile(needed)
                return
            self.install()
            self._compile(required(needed, self._runner.compiled))
            self._runner.compile_in_background(needed, around=self._kept)

    def rest(self) -> None:
        """Begin no further compile in the background, as no prompt runs that could use it."""
        self._runner.executables.background.forget()

    def install(self) -> None:
        """Put the steps into use that the background has compiled; between two steps."""
        if self._runner.install():
            self.tell_engine()

    def tell_engine(self) -> None:
        """Tell the engine which steps are compiled, and what those cost that came since.

        They are measured only where tokens are drafted.
        """
        with self._guard:
            compiled = self._runner.compiled
            several = [bucket.rows for bucket in compiled if bucket.steps > 1]
            self._engine.set_rows_of_several_decodes(max(several, default=0))
            new = [bucket for bucket in compiled if bucket not in self._known]
            if self._engine.speculates and new:
                self._measure(new)
            self._known.update(new)

    def _measure(self, buckets: Sequence[Bucket]) -> None:
        config = self._runner.config
        costs = measure(self._runner, buckets, config.lanes, no_row=config.max_batch)
        for key, seconds in costs.seconds.items():
            self._costs[key] = min(seconds, self._costs.get(key, seconds))
        self._engine.set_step_costs(Costs(dict(self._costs)))

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
        """Compile these steps, unless they are compiled, and tell the engine of them."""
        buckets = tuple(buckets)
        if not self._runner.executables.has(buckets):
            with self._kept(), self._new_bar() as bar:
                self._runner.warm_up(buckets, self._told(self._progress or bar.update))
        self.tell_engine()

    def _kept(self) -> AbstractContextManager[None]:
        """Return a context in which compiled steps are kept in the LLM's folder."""
        return compiled_steps_kept(self._cache)

    def _told(self, progress: Progress) -> Progress:
        """Return a function that tells of the progress, and lets a Ctrl-C take effect."""

        def told(done: int, total: int, what: str) -> None:
            self._guard.pass_on()
            progress(done, total, what)

        return told
