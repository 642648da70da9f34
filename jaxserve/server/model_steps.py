"""Compilation of a model's steps: those that a server is ready with, and those that come later."""

import gc
import threading
from contextlib import suppress
from functools import partial

from rich.console import Console

from jaxserve.engine.buckets import required
from jaxserve.engine.engine import Engine
from jaxserve.engine.engine_thread import EngineThread
from jaxserve.llm import LLM
from jaxserve.progress import Bar
from jaxserve.server.options import check_ready_when


class ModelSteps:
    """Compiles the steps of one engine.

    Args:
        llm: The model with its engine.
        ready_when: Value of --ready-when; None decides by the engine and its devices.
        bundled: Whether steps were compiled ahead, and are found in a bundle.

    Raises:
        ConfigError: --ready-when asks for what a deterministic engine may not do.
    """

    def __init__(self, llm: LLM, ready_when: str | None, bundled: bool, console: Console):
        self._llm = llm
        self._bundled = bundled
        self._console = console
        self._coming = False  # steps are compiled beside requests
        self._looks = False  # the engine's thread will look for steps that are compiled
        self._ready_when = ready_when or ("all" if llm.steps.compiles_all_first else "first")
        check_ready_when(self._ready_when, llm.runner.config.deterministic)

    def compile(self) -> None:
        """Compile the steps that the server is ready with."""
        llm = self._llm
        buckets = llm.runner.buckets.buckets
        if self._ready_when == "first":
            buckets = required(buckets)
        with Bar(self._console, "compiling") as bar:
            llm.runner.warm_up(buckets, bar.update)
        llm.steps.use_compiled()
        llm.prompts.grammars.warm_up()
        self._say_compiled()

    def compile_rest(self, thread: EngineThread) -> None:
        """Begin to compile the other steps in the background, for the engine of this thread."""
        runner = self._llm.runner
        thread.do(lambda engine: runner.executables.compiles.watch_thread())
        if not runner.missing(runner.buckets.buckets):
            return
        self._coming = True
        runner.compile_in_background(runner.buckets.buckets, lambda *_: self._look(thread))

    def _look(self, thread: EngineThread) -> None:
        """Let the engine's thread look for steps that are compiled; from any thread."""
        if not self._looks:
            self._looks = True
            thread.do(partial(self._use, thread))

    def _use(self, thread: EngineThread, engine: Engine) -> None:
        """Put the steps into use that are compiled; on the engine's thread."""
        self._looks = False
        if self._llm.steps.install():
            self._look(thread)
        if self._coming and not self._llm.runner.buckets_pending:
            self._coming = False
            # As at the end of loading: full collections would walk what the compiler has left.
            gc.freeze()
            # Not here, since whoever reads the line may hold up whoever writes it.
            with suppress(RuntimeError):  # no thread is left for it
                threading.Thread(target=self._say_compiled, name="say", daemon=True).start()

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
        if there == total:
            self._llm.steps.keep_record()

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
