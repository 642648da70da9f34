"""Compilation of a model's steps: those that a server is ready with, and those that come later."""

import gc
import logging
import threading
from concurrent.futures import Future
from importlib.metadata import version

from rich.console import Console

from jaxserve.cluster.compatibility import PACKAGES, digest, facts_of_engine, facts_of_model
from jaxserve.compilation_cache import has_record, keep_record
from jaxserve.engine.buckets import Bucket, required
from jaxserve.engine.engine import Engine
from jaxserve.errors import RestartingError
from jaxserve.llm import LLM
from jaxserve.progress import Bar
from jaxserve.server.core.engine_thread import EngineThread
from jaxserve.sharding.mesh import device_kind, platform, spans_hosts

log = logging.getLogger("jaxserve.serve")


class ModelSteps:
    """Compiles the steps of one engine.

    Args:
        llm: The model with its engine.
        ready_when: Value of --ready-when; None decides by the engine and its devices.
        bundled: Whether steps were compiled ahead, and are found in a bundle.
    """

    def __init__(self, llm: LLM, ready_when: str | None, bundled: bool, console: Console):
        self._llm = llm
        self._bundled = bundled
        self._console = console
        self._ready_when = ready_when or self._default()

    def _default(self) -> str:
        mesh = self._llm.model.mesh
        if spans_hosts(mesh) or self._llm.runner.config.deterministic:
            return "all"
        # XLA measures candidates of kernels on the GPU, which may not happen beside requests.
        measures = platform(mesh) == "gpu" and not self._bundled
        return "all" if measures and not has_record(self._key) else "first"

    @property
    def _key(self) -> str:
        """Digest of what decides the steps, and so the kernels that XLA chooses for them."""
        model = self._llm.model
        facts = facts_of_engine(
            facts_of_model(model.spec, model.dtype, model.weights), self._llm.runner.config
        )
        packages = [version(package) for package in PACKAGES]
        return digest(repr((facts, packages, device_kind(model.mesh), dict(model.mesh.shape))))

    def compile(self) -> None:
        """Compile the steps that the server is ready with."""
        llm = self._llm
        buckets = llm.runner.buckets.buckets
        if self._ready_when == "first":
            buckets = required(buckets)
        with Bar(self._console, "compiling") as bar:
            llm.runner.warm_up(buckets, bar.update)
        llm.use_compiled_steps()
        llm.prompts.grammars.warm_up()
        self._say_compiled()

    def compile_rest(self, thread: EngineThread) -> None:
        """Begin to compile the other steps in the background, for the engine of this thread."""

        def on_compiled(bucket: Bucket) -> None:
            thread.call(self._use).add_done_callback(_log_failure)

        runner = self._llm.runner
        thread.call(lambda engine: runner.executables.compiles.watch_thread())
        runner.compile_in_background(runner.buckets.buckets, on_compiled)

    def _use(self, engine: Engine) -> None:
        """Put the steps into use that are compiled; on the engine's thread."""
        self._llm.use_compiled_steps()
        # As at the end of loading: full collections would walk what the compiler has left.
        gc.freeze()
        if not self._llm.runner.buckets_pending:
            # Not here, since whoever reads the line may hold up whoever writes it.
            threading.Thread(target=self._say_compiled, name="compiled", daemon=True).start()

    def _say_compiled(self) -> None:
        """Say where the steps came from that are there, and how many are to come."""
        runner = self._llm.runner
        executables = runner.executables
        total = len(runner.buckets.buckets)
        there = len(runner.compiled)
        steps = f"{there} of {total} steps" if there < total else f"{total} steps"
        if not self._bundled:
            self._say(f"{steps} compiled, {executables.found_compiled} compiles found in the cache")
        elif there == total:
            self._say_bundled()
        if there == total and platform(self._llm.model.mesh) == "gpu":
            keep_record(self._key)

    def _say_bundled(self) -> None:
        executables = self._llm.runner.executables
        missed = executables.missed
        found = executables.programs - len(missed)
        total = executables.programs
        self._say(f"{found} of {total} steps and writers of rows found in the bundle")
        for name in missed:
            self._say(f"not found in the bundle, so compiled here: {name}")

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)


def _log_failure(future: Future[None]) -> None:
    if future.cancelled():
        return
    error = future.exception()
    if error and not isinstance(error, RestartingError):  # the engine has ended
        log.error("compiled steps could not be put into use", exc_info=error)
