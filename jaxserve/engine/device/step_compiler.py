"""Compiler of single steps, for any thread."""

import threading

import jax

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.compile_counter import CompileCounter
from jaxserve.engine.device.lowering import Lowering


class StepCompiler:
    """Lowers and compiles the programs of one engine, and knows which of them a cache had.

    Attributes:
        compiles: Counter of compiles by thread.
        missed: Names of the programs that the persistent compilation cache did not have.
        found: Number of compiles that the persistent cache answered.
    """

    def __init__(self, lowering: Lowering):
        self.compiles = CompileCounter()
        self.missed: list[str] = []
        self.found = 0
        self._lowering = lowering
        self._counting = threading.Lock()

    def lower(self, bucket: Bucket) -> jax.stages.Lowered:
        """Lower the step of this shape."""
        return self._lowering.step(bucket)

    def step(self, bucket: Bucket) -> jax.stages.Compiled:
        """Lower and compile the step of this shape."""
        return self.compile(str(bucket), self.lower(bucket))

    def compile(self, name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compile a lowered program.

        Args:
            name: Name of the program for `missed`.
        """
        before = self.compiles.here.hits
        compiled = lowered.compile()
        found = self.compiles.here.hits - before
        with self._counting:
            self.found += found
            if not found:
                self.missed.append(name)
        return compiled
