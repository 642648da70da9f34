"""Compiled programs of an engine: steps, row writers, and reads and writes of pages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp

from jaxserve.engine.buckets import Bucket, draft_counts
from jaxserve.engine.device.background import LOWERING, BackgroundCompiler, compiles_at_once
from jaxserve.engine.device.compile_counter import CompileCounter
from jaxserve.engine.device.kernels.attention_check import check_attention
from jaxserve.engine.device.kernels.choice import (
    attention_options,
    grouped_demands,
    recurrence_demands,
)
from jaxserve.engine.device.kernels.matmul_check import check_grouped_matmul, check_quantized_matmul
from jaxserve.engine.device.kernels.recurrence_check import check_recurrence
from jaxserve.engine.device.lowering import Lowering
from jaxserve.engine.device.step_compiler import StepCompiler
from jaxserve.pallas_kernels import dispatch
from jaxserve.pallas_kernels.gated_delta import api as gated_delta

Progress = Callable[[int, int, str], None]  # jobs done, jobs in all, name of the next job
Job = tuple[str, Callable[[], None]]
Prepare = Callable[[Bucket, jax.stages.Compiled], None]


class Executables:
    """Everything that an engine launches, compiled ahead of its first use.

    Attributes:
        steps: Steps that may be launched. Only the thread that launches adds to them.
        background: Compiler of steps that come later, while the engine runs.
    """

    def __init__(self, lowering: Lowering):
        self.steps: dict[Bucket, jax.stages.Compiled] = {}
        self.writers: dict[str, jax.stages.Compiled] = {}  # by name
        self.page_programs: dict[str, jax.stages.Compiled] = {}  # by name
        self._lowering = lowering
        self._compiler = StepCompiler(lowering)
        # Without a way back to this object, or to the runner: a compile that runs would keep them,
        # and a cycle would keep the device memory of an engine that nothing refers to any more.
        self.background = BackgroundCompiler(
            self._compiler.step, self._compiler.compiles, compiles_at_once()
        )

    def warm_up(
        self,
        buckets: Iterable[Bucket],
        prepare: Prepare,
        progress: Progress = lambda done, total, what: None,
    ) -> None:
        """Compile these steps and all other programs, unless that has happened already.

        Kernels are compared with their references before anything is compiled: EngineError where
        they differ.

        Args:
            prepare: Function called with each step before its first use.
        """
        jobs: list[Job] = []
        # The writers are compiled first of all programs, so they tell if this is the first call.
        if not self.writers:
            jobs += self._self_checks()
            jobs.append(("row writers", self._compile_writers))
        if self._lowering.config.page_exchange and not self.page_programs:
            jobs.append(("pages for other engines", self._compile_page_programs))
        missing = [bucket for bucket in dict.fromkeys(buckets) if bucket not in self.steps]
        with self._lowered_ahead(missing) as lowered:
            for bucket, ahead in lowered.items():
                job = partial(self._compile_step, bucket, ahead, prepare)
                jobs.append((str(bucket), job))
            for done, (what, job) in enumerate(jobs):
                progress(done, len(jobs), what)
                job()
        if jobs:
            progress(len(jobs), len(jobs), "")

    @contextmanager
    def _lowered_ahead(
        self, buckets: Sequence[Bucket]
    ) -> Iterator[dict[Bucket, Future[jax.stages.Lowered]]]:
        """Lower these steps one after the other, on another thread.

        Lowering takes one core and the GIL. The compiler does not need the GIL, nor both of two
        cores all the time, so a step is lowered while another one is compiled.
        """
        if not buckets:
            yield {}
            return
        with ThreadPoolExecutor(1, thread_name_prefix=LOWERING) as thread:
            try:
                yield {bucket: thread.submit(self._compiler.lower, bucket) for bucket in buckets}
            finally:
                thread.shutdown(cancel_futures=True)

    def _compile_step(
        self, bucket: Bucket, lowered: Future[jax.stages.Lowered], prepare: Prepare
    ) -> None:
        self.background.forget([bucket])
        step = self._compiler.compile(str(bucket), lowered.result())
        prepare(bucket, step)
        self.steps[bucket] = step

    def has(self, buckets: Iterable[Bucket]) -> bool:
        """Return whether a warm-up for these buckets would find nothing to do."""
        return bool(self.writers) and all(bucket in self.steps for bucket in buckets)

    def clear(self) -> None:
        """Forget all programs and stop counting compiles."""
        self.steps.clear()
        self.writers.clear()
        self.page_programs.clear()
        self.background.close()
        self._compiler.compiles.close()

    # ---- figures

    @property
    def programs(self) -> int:
        """Number of compiled programs."""
        return len(self.steps) + len(self.writers) + len(self.page_programs)

    @property
    def compiles(self) -> CompileCounter:
        """Counter of compiles by thread."""
        return self._compiler.compiles

    @property
    def missed(self) -> list[str]:
        """Names of the programs that the persistent compilation cache did not have."""
        return self._compiler.missed

    @property
    def found_compiled(self) -> int:
        """Compiles that the persistent cache answered."""
        return self._compiler.found

    @property
    def compiles_after_ready(self) -> int:
        """Compiles in watched blocks, for which a request has waited."""
        return self.compiles.watched

    # ---- jobs of a warm-up

    def _self_checks(self) -> list[Job]:
        lowering = self._lowering
        checks: list[Job] = []
        if lowering.attention not in dispatch.RUN_IN_TESTS:
            checks.append(("attention against its reference", self._check_attention))
        if lowering.kernel_weights:
            checks.append(("quantized matmul against its reference", self._check_quantized_matmul))
        if lowering.spec.mixture and lowering.grouped_matmul != "reference":
            checks.append(("grouped matmul against its reference", self._check_grouped_matmul))
        if self._recurrence_demands and lowering.recurrence != "reference":
            checks.append(("recurrence against its reference", self._check_recurrence))
        return checks

    def _check_attention(self) -> None:
        lowering = self._lowering
        spec = lowering.spec
        config = lowering.config
        mesh = lowering.mesh
        page_dtype = jnp.dtype(config.page_dtype)
        # One token per row is a decode, more are a verification, and None is a step of prompts.
        verified = [1 + drafts for drafts in draft_counts(config.draft_tokens)]
        steps = [
            attention_options(spec, group, mesh, config.page_size, page_dtype, max_row_tokens)
            for group in spec.page_groups()
            for max_row_tokens in (1, *verified, None)
        ]
        heads = spec.num_heads // mesh.shape["tensor"]
        dtype = lowering.params["embed"].dtype
        check_attention(lowering.attention, steps, heads, dtype, mesh.local_devices[0])

    def _check_quantized_matmul(self) -> None:
        weights = self._lowering.kernel_weights.values()
        demands = ((weight.kernel, weight.demand) for weight in weights)
        check_quantized_matmul(demands, self._lowering.mesh.local_devices[0])

    def _check_grouped_matmul(self) -> None:
        lowering = self._lowering
        kernel = dispatch.GROUPED[lowering.grouped_matmul]
        dtype = lowering.params["embed"].dtype
        demands = grouped_demands(
            lowering.spec, lowering.config, lowering.mesh, kernel, dtype, lowering.scheme
        )
        check_grouped_matmul(kernel, demands, lowering.mesh.local_devices[0])

    def _check_recurrence(self) -> None:
        lowering = self._lowering
        kernel = dispatch.RECURRENCES[lowering.recurrence]
        dtype = lowering.params["embed"].dtype
        device = lowering.mesh.local_devices[0]
        check_recurrence(kernel, self._recurrence_demands, dtype, device)

    @property
    def _recurrence_demands(self) -> list[tuple[gated_delta.Options, gated_delta.Demand]]:
        return recurrence_demands(self._lowering.spec, self._lowering.mesh)

    def _compile_writers(self) -> None:
        writers = self._lowering.writers().items()
        self.writers |= {name: self._compiler.compile(name, writer) for name, writer in writers}

    def _compile_page_programs(self) -> None:
        programs = self._lowering.page_programs().items()
        compiled = {name: self._compiler.compile(name, each) for name, each in programs}
        self.page_programs |= compiled
