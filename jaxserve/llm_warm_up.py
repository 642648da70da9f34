"""Steps of an LLM, compiled and measured when prompts need them."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from importlib.metadata import version

from jaxserve.cache_folders import compiler_flags
from jaxserve.call_guard import CallGuard
from jaxserve.cluster.compatibility import PACKAGES, digest, facts_of_engine, facts_of_model
from jaxserve.compilation_cache import KeptSteps, has_record, keep_record
from jaxserve.engine.buckets import Bucket, required
from jaxserve.engine.device.executables import Progress
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.engine.request_limits import max_new_tokens
from jaxserve.engine.step_costs import StepCosts
from jaxserve.loading.folder import Model
from jaxserve.progress import Bar
from jaxserve.prompts import Prepared
from jaxserve.sharding.mesh import compiler_version, device_kind, platform, spans_hosts


class WarmUp:
    """Compiles steps, and measures them where tokens are drafted. The guard is held meanwhile.

    Args:
        models: Model of the engine, and the draft model if there is one.
        engine: Engine that is told which steps there are and what they cost.
        runner: Runner that compiles.
        guard: Guard of the LLM's calls, which lets a Ctrl-C take effect between two steps.
        kept: Folder that keeps the compiled steps.
        new_bar: Function that makes the bar of one run of the compiler.
        progress: Function told of the progress instead of the bar.
    """

    def __init__(
        self,
        models: Sequence[Model],
        engine: Engine,
        runner: DeviceRunner,
        guard: CallGuard,
        kept: KeptSteps,
        new_bar: Callable[[], Bar],
        progress: Progress | None,
    ):
        self._models = models
        self._engine = engine
        self._runner = runner
        self._guard = guard
        self._kept = kept
        self._new_bar = new_bar
        self._progress = progress
        self._known: set[Bucket] = set()  # steps that the engine was told of
        config = runner.config
        self._costs = StepCosts(runner, config.lanes, no_row=config.max_batch)
        self._unmeasured: deque[Bucket] = deque()
        self._disturbed = False  # steps were measured beside a compile

    # ---- before prompts run

    @cached_property
    def compiles_all_first(self) -> bool:
        """True if all steps that may be needed are compiled before any runs, unless told otherwise.

        A text of a deterministic engine may not change with what is compiled, several hosts have to
        agree on each step, and on a GPU XLA chooses kernels by measuring them, which other steps
        would disturb. It does so once: what it finds is kept in a part of the folder of compiled
        steps that is not trimmed, and a record beside them says that all was compiled.
        """
        if self._runner.config.deterministic or spans_hosts(self._runner.mesh):
            return True
        if platform(self._runner.mesh) != "gpu":
            return False
        with self._kept.used():
            return not has_record(self._key)

    def compile_for(self, prompts: Sequence[Prepared] | None) -> None:
        """Compile the steps that prompts need; None is every step there is."""
        with self._guard:
            self._engine.check_usable()
            if prompts is None:
                self._compile(self._runner.buckets.buckets)
                self.keep_record()
            elif prompts:
                self._compile(self._needed(prompts))
            self._measure(self._tell_engine())

    def compile_first(self, prompts: Sequence[Prepared]) -> list[Bucket]:
        """Compile the fewest steps that prompts can run with, and return those left to compile."""
        with self._guard:
            self._engine.check_usable()
            missing = []
            if prompts and self._runner.missing(self._runner.buckets.buckets):
                missing = self._runner.missing(self._needed(prompts))
            if missing and self.compiles_all_first:
                self._compile(missing)
            elif fewest := required(missing, self._runner.compiled):
                self._compile(fewest)
            # In each call: the last one may have been interrupted behind a compile.
            self._measure(self._tell_engine())
            return self._runner.missing(missing)

    def begin(self, prompts: Sequence[Prepared]) -> None:
        """Compile the fewest steps that prompts can run with, and begin with the others."""
        if others := self.compile_first(prompts):
            self._runner.compile_in_background(others, around=self._kept.used)

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
        """Compile these steps, unless they are compiled."""
        buckets = tuple(buckets)
        if self._runner.executables.has(buckets):
            return
        with self._runner.executables.background.paused(self._guard.pass_on):
            self._runner.install()
            with self._kept.used(), self._new_bar() as bar:
                self._runner.warm_up(buckets, self._told(self._progress or bar.update))

    def _told(self, progress: Progress) -> Progress:
        """Return a function that tells of the progress, and lets a Ctrl-C take effect."""

        def told(done: int, total: int, what: str) -> None:
            self._guard.pass_on()
            progress(done, total, what)

        return told

    # ---- while prompts run

    def install(self) -> bool:
        """Put the steps into use that the background has compiled; between two steps.

        Where tokens are drafted, one step is measured in each call.

        Returns:
            Whether steps are left to be measured.
        """
        if self._runner.install():
            self._disturbed = True
            self._unmeasured += self._tell_engine()
        if self._unmeasured:
            self._measure([self._unmeasured.popleft()])
        if self._disturbed and not self._unmeasured and not self._runner.buckets_pending:
            self._disturbed = False
            self._unmeasured += self._costs.measured
        return bool(self._unmeasured)

    def rest(self) -> None:
        """Begin no further compile, as no prompt runs any more."""
        self._runner.executables.background.forget()

    def use_compiled(self) -> None:
        """Put every compiled step into use, and measure those that are new."""
        with self._guard:
            self._runner.install()
            self._measure(self._tell_engine())

    def _tell_engine(self) -> list[Bucket]:
        """Tell the engine which steps are compiled, and return those that are to be measured."""
        compiled = self._runner.compiled
        several = [bucket.rows for bucket in compiled if bucket.steps > 1]
        self._engine.set_rows_of_several_decodes(max(several, default=0))
        new = [bucket for bucket in compiled if bucket not in self._known]
        self._known.update(new)
        if not self._engine.speculates:
            return []
        return [bucket for bucket in new if self._costs.concerns(bucket)]

    def _measure(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self._costs.measure(bucket)
            self._engine.set_step_costs(self._costs.costs)

    # ---- records of GPUs

    def keep_record(self) -> None:
        """Keep a record that every step was compiled on these devices."""
        if platform(self._runner.mesh) == "gpu":
            with self._kept.used():
                keep_record(self._key)

    @cached_property
    def _key(self) -> str:
        """Digest of what decides the steps, and so the kernels that XLA chooses for them."""
        model = self._models[0]
        mesh = model.mesh
        facts = [facts_of_model(each.spec, each.dtype, each.weights) for each in self._models]
        engine = facts_of_engine({}, self._runner.config)
        packages = [version(package) for package in PACKAGES]
        devices = device_kind(mesh), dict(mesh.shape), compiler_version(mesh)
        return digest(repr((facts, engine, packages, devices, compiler_flags())))
