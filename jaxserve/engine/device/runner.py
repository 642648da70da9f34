"""The device half: holds parameters and state, compiles every step ahead, and turns plans into
launches.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import batched
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.engine.buckets import Bucket, BucketPlan, choose, drafts_of
from jaxserve.engine.device.batch import (
    allowed_bits,
    download_layout,
    pack_admission,
    pack_lane,
    pack_masks,
    token_counts,
    unpack_lane,
    upload_layout,
)
from jaxserve.engine.device.compile_counter import CompileCounter
from jaxserve.engine.device.drafting import Drafter
from jaxserve.engine.device.kernels.attention import attention_options
from jaxserve.engine.device.kernels.attention_check import prove_attention
from jaxserve.engine.device.kernels.grouped_matmul import products_of_steps
from jaxserve.engine.device.kernels.matmul_check import prove_grouped, prove_quantized
from jaxserve.engine.device.lowering import Lowering, abstract_params
from jaxserve.engine.device.page_io import PagesRead
from jaxserve.engine.device.state import State, new_state
from jaxserve.engine.kv_segment import Piece
from jaxserve.engine.plan import MEASURED, Admission, StepOutput, StepPlan
from jaxserve.errors import EngineError
from jaxserve.models.quant import scheme_in
from jaxserve.models.spec import ModelSpec
from jaxserve.request import MAX_BIASES
from pallas_kernels import dispatch

Progress = Callable[[int, int, str], None]  # done, total, what


@dataclass(slots=True)
class Padding:
    """What a bucket was used for: tokens that were planned, after an end among them too, and that
    were computed.
    """

    launches: int = 0
    live_tokens: int = 0
    computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Launched:
    bucket: Bucket
    output: jax.Array  # [A, size] int32


class DeviceRunner:
    """Implements engine.Runner on a mesh. Compiled steps only: nothing is traced after
    `warm_up`."""

    def __init__(
        self,
        spec: ModelSpec,
        params: dict,
        config: EngineConfig,
        mesh: Mesh,
        drafter: Drafter | None = None,
    ):
        self.spec, self.config, self.mesh = spec, config, mesh
        self.buckets = BucketPlan.of(config)
        self.lowering = Lowering(
            spec,
            abstract_params(spec, params["embed"].dtype, mesh, scheme_in(params)),
            config,
            mesh,
            drafter,
        )
        self._params = params | {"drafter": drafter.params} if drafter else params
        self._state = new_state(self.lowering.state)
        self.writers: dict[str, Any] = {}
        self._page_io = self.lowering.page_io
        self._steps: dict[Bucket, Any] = {}
        self._compiles = CompileCounter()
        self.missed: list[str] = []  # steps and writers that the persistent cache did not have
        self._expected_compiles = 0
        self.padding: dict[Bucket, Padding] = {}
        self.total = Padding()  # of all buckets
        self.collected: Bucket | None = None  # whose output was read last

    # ---- compiling

    def warm_up(
        self, buckets: Iterable[Bucket], progress: Progress = lambda done, total, what: None
    ) -> None:
        """Compile these steps, and all that is no step, as far as that has not happened yet.

        Before the first of them a kernel's results are compared with the reference's: EngineError
        where they differ.
        """
        before = self._compiles.count
        jobs: list[tuple[str, Callable[[], None]]] = []
        if not self.writers:
            if self.lowering.attention != "reference":
                jobs.append(("attention beside the reference", self._prove_attention))
            if self.lowering.placed or (
                self.spec.mixture and self.lowering.grouped_matmul != "reference"
            ):
                jobs.append(("products beside the reference", self._prove_products))
            jobs.append(("row writers", self._compile_writers))
            if self.config.page_exchange:
                jobs.append(("pages for other engines", self._compile_page_io))
        jobs += [(str(b), partial(self._compile_step, b)) for b in buckets if b not in self._steps]
        for done, (what, job) in enumerate(jobs):
            progress(done, len(jobs), what)
            job()
        if jobs:
            progress(len(jobs), len(jobs), "")
        self._expected_compiles += self._compiles.count - before

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Around what compiles before the engine is ready, and is no program of its own."""
        before = self._compiles.count
        try:
            yield
        finally:
            self._expected_compiles += self._compiles.count - before

    @property
    def compiled(self) -> tuple[Bucket, ...]:
        return tuple(self._steps)

    @property
    def programs(self) -> int:
        """How many there are: steps, writers of rows, reads and writes of pages for other
        engines."""
        return len(self._steps) + len(self.writers) + len(self._page_io.programs)

    @property
    def compiles_after_ready(self) -> int:
        """Compiles of the whole process since this runner exists, but for its own warm-ups, and
        `preparing`.
        """
        return self._compiles.count - self._expected_compiles

    @property
    def found_compiled(self) -> int:
        """Steps that the persistent cache had."""
        return self._compiles.hits

    def _prove_attention(self) -> None:
        spec, mesh, dtype = self.spec, self.mesh, self.lowering.params["embed"].dtype
        stored = jnp.dtype(self.config.page_dtype)
        steps = [
            attention_options(spec, group, mesh, self.config.page_size, stored, most)
            for group in spec.page_groups()
            for most in (1, *(1 + k for k in drafts_of(self.config.draft_tokens)), None)
        ]
        heads, device = spec.num_heads // mesh.shape["tensor"], mesh.local_devices[0]
        prove_attention(self.lowering.attention, steps, heads, dtype, device)

    def _prove_products(self) -> None:
        lowering, device = self.lowering, self.mesh.local_devices[0]
        prove_quantized(
            ((placed.kernel, placed.demand) for placed in lowering.placed.values()), device
        )
        if self.spec.mixture and lowering.grouped_matmul != "reference":
            kernel, dtype = (
                dispatch.GROUPED[lowering.grouped_matmul],
                lowering.params["embed"].dtype,
            )
            asked = products_of_steps(
                self.spec, self.config, self.mesh, kernel, dtype, lowering.form
            )
            prove_grouped(kernel, asked, device)

    def _compile_step(self, bucket: Bucket) -> None:
        self._steps[bucket] = self._compiled(str(bucket), self.lowering.step(bucket))
        self.padding.setdefault(bucket, Padding())

    def _compile_writers(self) -> None:
        self.writers = {
            name: self._compiled(name, writer) for name, writer in self.lowering.writers().items()
        }

    def _compile_page_io(self) -> None:
        for name, program in self.lowering.page_programs().items():
            self._page_io.programs[name] = self._compiled(name, program)

    def _compiled(self, name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        hits, compiled = self._compiles.hits, lowered.compile()
        if self._compiles.hits == hits:
            self.missed.append(name)
        return compiled

    # ---- running

    def launch(self, plan: StepPlan) -> Launched:
        """Write the plan's admissions and start its step; returns before the device is done."""
        _check_decodes(plan) if plan.kind == "decode" else _check_chunks(plan)
        for admission in plan.admissions:
            self.admit(admission)
        self._write_masks(
            [(i, row, mask) for i, lane in enumerate(plan.lanes) for row, mask in lane.masks]
        )
        bucket = choose(
            self._steps, plan.kind, plan.num_rows, plan.num_tokens, plan.steps, plan.drafts
        )
        groups = self.lowering.page_groups
        layout = upload_layout(bucket, groups, self.config.page_size)
        pack = partial(
            pack_lane,
            bucket=bucket,
            layout=layout,
            page_size=self.config.page_size,
            page_groups=groups,
            no_row=self.config.max_batch,
        )
        upload = np.stack([pack(lane) for lane in plan.lanes])
        self._state, output = self._steps[bucket](self._params, self._state, upload)
        output.copy_to_host_async()
        if plan.number != MEASURED:
            self._count(bucket, plan)
        return Launched(bucket, output)

    def admit(self, a: Admission) -> None:
        """Write a row's fields, before any step that has it."""
        vocab, at = self.spec.vocab_size, np.array([a.lane, a.row], np.int32)
        self._write(
            "admit_row",
            pack_admission(a, self.lowering.admission, self.config.pages_per_row, vocab),
        )
        if a.history is not None:
            self._write("set_counts", at, token_counts(a, vocab))
        if a.bias:
            ids, values = np.full(MAX_BIASES, vocab, np.int32), np.zeros(MAX_BIASES, np.float32)
            ids[: len(a.bias)], values[: len(a.bias)] = zip(*a.bias, strict=True)
            self._write("set_bias", at, ids, values)
        if a.allowed is not None:
            _, slots, _ = self.lowering.masks_shape
            self._write_masks([(a.lane, a.row, slots * allowed_bits(a.allowed, vocab).tobytes())])

    def _write_masks(self, entries: Sequence[tuple[int, int, bytes]]) -> None:
        """Of lane and row, for the places where it samples next."""
        width, slots, words = self.lowering.masks_shape
        for some in batched(entries, width):
            self._write(
                "set_masks", *pack_masks(some, width, slots, words, no_row=self.config.max_batch)
            )

    def _write(self, name: str, *values: np.ndarray) -> None:
        self._state = self.writers[name](self._state, *values)

    def collect(self, plan: StepPlan, handle: Launched) -> StepOutput:
        """The step's results on the host; waits for the device."""
        array, layout = np.asarray(handle.output), download_layout(handle.bucket, self.spec.d_model)
        self.collected = handle.bucket
        return StepOutput(
            tuple(
                unpack_lane(lane, layout, values)
                for lane, values in zip(plan.lanes, array, strict=True)
            )
        )

    def read_pages(self, lane: int, group: int, ids: Sequence[int]) -> PagesRead:
        """Start to copy pages of a page group, as many as page_counts has, to elsewhere on the
        devices.

        What steps write later is not in them.
        """
        return self._page_io.read(self._held.pages, lane, group, ids)

    def check_piece(self, piece: Piece) -> None:
        """ConfigError or EngineError where it cannot become pages here."""
        self._page_io.check(piece)

    def upload_pages(self, group: int, arrays: Mapping[str, np.ndarray]) -> Any:
        """Bring arrays of a piece, of as many whole pages as page_counts has, to the devices. For
        any thread.
        """
        return self._page_io.upload(group, arrays)

    @property
    def page_form(self) -> object:
        """Equal where what one runner of the model has read can be moved to another's devices."""
        return self._page_io.form

    def move_pages(self, group: int, read: PagesRead) -> Any:
        """Bring what another runner of the same page_form has read to these devices, without the
        host, and wait for it.

        As if it was uploaded. For any thread.
        """
        return self._page_io.move(group, read)

    def write_pages(self, lane: int, group: int, ids: Sequence[int], uploaded: Any) -> None:
        """Write what was uploaded into these pages, before any step that is launched later; NO_PAGE
        drops a page.
        """
        pages = self._page_io.write(self._held.pages, lane, group, ids, uploaded)
        self._state = replace(self._held, pages=pages)

    @property
    def _held(self) -> State:
        """EngineError once it was freed."""
        if self._state is None:
            raise EngineError("the engine is closed; make a new one")
        return self._state

    def expert_load(self) -> np.ndarray:
        """How many tokens every expert has answered so far, modulo 2^32: uint32 [layers with
        experts, experts].

        On several hosts, tokens of this one's lanes. Waits for the device. EngineError where the
        model has no experts.
        """
        if self._state is None or self._state.load is None:
            raise EngineError("there are no experts whose load could be read")
        lanes = {shard.index[0].start: shard.data for shard in self._state.load.addressable_shards}
        return np.concatenate([np.asarray(lane) for lane in lanes.values()]).sum(0, dtype=np.uint32)

    def wait(self) -> None:
        """Until the device has done all that was launched."""
        jax.block_until_ready(self._state)

    def _count(self, bucket: Bucket, plan: StepPlan) -> None:
        live, computed = (
            sum(len(lane.tokens) for lane in plan.lanes),
            bucket.tokens * bucket.steps * self.config.lanes,
        )
        for padding in (self.padding[bucket], self.total):
            padding.launches += 1
            padding.live_tokens += live
            padding.computed_tokens += computed

    def close(self) -> None:
        """Free the device memory of parameters and state; a second time does nothing."""
        for leaf in jax.tree.leaves(self._params):
            leaf.delete()
        self._params = {}
        self.release_state()

    def release_state(self) -> None:
        """Free pages and rows, and forget the compiled steps."""
        if self._state is None:
            return
        for leaf in jax.tree.leaves(self._state):
            leaf.delete()
        self._state, self._steps, self.writers = None, {}, {}
        self._page_io.programs.clear()
        self._compiles.close()


def _check_decodes(plan: StepPlan) -> None:
    """EngineError for what the compiled decode steps cannot take."""
    for lane in plan.lanes:
        if lane.sizes != lane.samples or max(lane.sizes, default=1) > plan.steps:
            raise EngineError(
                f"a decode step of {plan.steps} takes rows of {lane.sizes}, sampling {lane.samples}"
            )


def _check_chunks(plan: StepPlan) -> None:
    """EngineError for what the compiled steps of prompts cannot take."""
    if plan.kind != "verify" and any(
        samples > 1 for lane in plan.lanes for samples in lane.samples
    ):
        raise EngineError(
            f"a {plan.kind} step samples one token per row; drafted tokens are verified by "
            f"verify steps"
        )
    if any(lane.sizes != sorted(lane.sizes, key=lambda size: size != 1) for lane in plan.lanes):
        raise EngineError("chunks of one token have to come first in a plan")
