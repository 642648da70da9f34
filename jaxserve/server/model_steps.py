"""Compilation of a model's steps: those that a server is ready with, and those that come later."""

import gc
import sys
import threading
from functools import partial

from rich.console import Console

from jaxserve.engine.buckets import required
from jaxserve.engine.engine import Engine
from jaxserve.errors import flag_error
from jaxserve.llm import LLM
from jaxserve.progress import Bar
from jaxserve.server.core.engine_thread import EngineThread

TURN_SECONDS = 0.0005  # for which a thread may keep the GIL from others while steps are compiled


class ShortTurns:
    """Lets threads take the GIL from each other sooner while any engine's steps are compiled.

    Lowering is Python, and the engine needs the GIL several times in each step: with turns of the
    usual 5 ms a step of 3 ms took over 60.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._usual = sys.getswitchinterval()

    def begin(self) -> None:
        with self._lock:
            self._users += 1
            sys.setswitchinterval(TURN_SECONDS)

    def end(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                sys.setswitchinterval(self._usual)


class ModelSteps:
    """Compiles the steps of one engine.

    Args:
        llm: The model with its engine.
        ready_when: Value of --ready-when; None decides by the engine and its devices.
        bundled: Whether steps were compiled ahead, and are found in a bundle.
        turns: Turns of the process's threads.

    Raises:
        ConfigError: --ready-when asks for what a deterministic engine may not do.
    """

    def __init__(
        self,
        llm: LLM,
        ready_when: str | None,
        bundled: bool,
        console: Console,
        turns: ShortTurns,
    ):
        self._llm = llm
        self._bundled = bundled
        self._console = console
        self._turns = turns
        self._coming = False  # steps are compiled beside requests
        # What a bundle has was compiled, and its kernels chosen, elsewhere.
        waits = llm.steps.may_not_change or (llm.steps.measures_kernels and not bundled)
        self._ready_when = ready_when or ("all" if waits else "first")
        if self._ready_when == "first" and llm.runner.config.deterministic:
            problem = "with --deterministic no text may change while steps come (choose all)"
            raise flag_error("--ready-when", "first", problem)

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
        self._turns.begin()
        runner.compile_in_background(
            runner.buckets.buckets, lambda *_: thread.do(partial(self._use, thread))
        )

    def _use(self, thread: EngineThread, engine: Engine) -> None:
        """Put the steps into use that are compiled; on the engine's thread."""
        if self._llm.steps.install():
            thread.do(partial(self._use, thread))
        # As at the end of loading: full collections would walk what the compiler has left.
        gc.freeze()
        if self._coming and not self._llm.runner.buckets_pending:
            self._coming = False
            self._turns.end()
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
