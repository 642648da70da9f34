"""The device half of an engine: holds parameters and state, and turns plans into launches."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.engine.buckets import Bucket, BucketPlan, by_gain, choose
from jaxserve.engine.device.background import Around, OnEnd
from jaxserve.engine.device.batch import download_layout, pack_lane, unpack_lane, upload_layout
from jaxserve.engine.device.drafting import Drafter
from jaxserve.engine.device.executables import Executables, Progress
from jaxserve.engine.device.lowering import Lowering, abstract_params
from jaxserve.engine.device.page_store import PageStore
from jaxserve.engine.device.plan_checks import check_plan
from jaxserve.engine.device.row_updates import RowUpdates
from jaxserve.engine.device.state import StateHolder, new_state
from jaxserve.engine.empty_step import empty_step
from jaxserve.engine.plan import MEASURED, StepOutput, StepPlan
from jaxserve.errors import EngineError
from jaxserve.models.quant import scheme_in
from jaxserve.models.spec import ModelSpec
from jaxserve.models.summed_last import product_in
from jaxserve.sharding.mesh import platform

# Launches without sequences before a step is used. XLA:GPU executes a step's kernels one by one the
# first time and records them as a graph the second time (CommandBufferThunk::ExecuteOnStream). A
# TPU loads its program, and a CPU has nothing left to do.
EMPTY_LAUNCHES = {"gpu": 2, "tpu": 1, "cpu": 0}


@dataclass(slots=True)
class Padding:
    """Use of a bucket: its launches, and how many of the tokens that they computed were planned."""

    launches: int = 0
    live_tokens: int = 0  # planned ones, even if a text turned out to end before them
    computed_tokens: int = 0  # with the padding of the bucket


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device was given, and the handle to its output."""

    bucket: Bucket
    output: jax.Array  # [A, size] int32


class DeviceRunner:
    """Runner of steps on a mesh (see engine.Runner); nothing is traced after `warm_up`."""

    def __init__(
        self,
        spec: ModelSpec,
        params: dict,
        config: EngineConfig,
        mesh: Mesh,
        drafter: Drafter | None = None,
    ):
        self.spec = spec
        self.config = config
        self.mesh = mesh
        self.buckets = BucketPlan.of(config)
        dtype = params["embed"].dtype
        declared = abstract_params(spec, dtype, mesh, scheme_in(params), product_in(params))
        self.lowering = Lowering(spec, declared, config, mesh, drafter)
        self._params = params | {"drafter": drafter.params} if drafter else params
        self._state = StateHolder(new_state(self.lowering.state))
        self.empty_launches = EMPTY_LAUNCHES.get(platform(mesh), 0)
        # Compiles are counted from here on, without the one that made the state.
        self.executables = Executables(self.lowering)  # what is compiled, and figures of compiling
        self._coming: dict[Bucket, jax.stages.Compiled] = {}  # compiled, and not in use yet
        # Asked for in the background, and not in use yet; replaced whole, as other threads read it.
        self._awaited: frozenset[Bucket] = frozenset()
        # Access for KV transfer.
        self.pages = PageStore(
            config, self.lowering.page_io, self.executables.page_programs, self._state
        )
        self.rows = RowUpdates(
            spec.vocab_size,
            config,
            self.lowering.masks_shape,
            self.executables.writers,
            self._state,
        )
        self.padding: dict[Bucket, Padding] = {}  # use of each compiled bucket
        self.total = Padding()  # use of all buckets
        self.collected: Bucket | None = None  # the bucket whose output was read last

    # ---- compiling

    def warm_up(
        self, buckets: Iterable[Bucket], progress: Progress = lambda done, total, what: None
    ) -> None:
        """Compile these steps and all other programs, see Executables.warm_up.

        The background compiles nothing meanwhile.
        """
        with self.executables.background.paused():
            self.executables.warm_up(buckets, self._prepare, progress)

    def compile_in_background(
        self,
        buckets: Iterable[Bucket],
        on_end: OnEnd | None = None,
        around: Around | None = None,
    ) -> None:
        """Compile those of these steps that are not compiled, and return at once.

        The steps that gain most come first; see BackgroundCompiler.ask.
        """
        order = by_gain(self.missing(buckets), self.compiled)
        self._awaited |= set(order)
        self.executables.background.ask(order, on_end, around)

    def missing(self, buckets: Iterable[Bucket]) -> list[Bucket]:
        """Return those of these buckets whose steps cannot be launched yet."""
        return [bucket for bucket in buckets if bucket not in self.executables.steps]

    def install(self) -> tuple[Bucket, ...]:
        """Put the steps into use that the background has compiled, and return them.

        For the thread that launches, between two steps.
        """
        self._take_compiled()
        return self.install_all(tuple(self._coming))

    def install_all(self, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """Put these steps into use, which the background has compiled, and return them."""
        self._take_compiled()
        for bucket in buckets:
            if bucket not in self.executables.steps:
                self._prepare(bucket, self._coming[bucket])
                self.executables.steps[bucket] = self._coming[bucket]
            del self._coming[bucket]
        self._awaited = self._awaited.difference(self.executables.steps)
        return tuple(buckets)

    def _take_compiled(self) -> None:
        self._coming |= self.executables.background.take()

    def _prepare(self, bucket: Bucket, step: jax.stages.Compiled) -> None:
        """Launch a step without sequences until its later launches take as long as they can."""
        plan = empty_step(bucket, self.config.lanes, no_row=self.config.max_batch)
        for _ in range(self.empty_launches):
            self._start(bucket, step, plan).block_until_ready()
        self.padding.setdefault(bucket, Padding())

    @property
    def compiled(self) -> tuple[Bucket, ...]:
        """Buckets whose steps are compiled."""
        return tuple(self.executables.steps)

    @property
    def compiles_after_ready(self) -> int:
        """Compiles for which a request has waited; 0, or something is wrong."""
        return self.executables.compiles_after_ready

    @property
    def background_compiles(self) -> int:
        """Number of compiles beside the engine, with those that the persistent cache answered."""
        return self.executables.background.count

    @property
    def buckets_pending(self) -> int:
        """Number of buckets that the background has yet to compile, or the engine to use.

        For any thread.
        """
        expects = self.executables.background.expects
        return sum(b in self._coming or expects(b) for b in self.missing(self._awaited))

    # ---- running

    def launch(self, plan: StepPlan) -> Launched:
        """Write the plan's admissions and start its step; returns before the device is done."""
        check_plan(plan)
        with self.executables.compiles.watching():
            # The device runs launches in their order, so rows are written before the step reads
            # them.
            for admission in plan.admissions:
                self.rows.admit(admission)
            self.rows.write_masks(
                [(i, row, mask) for i, lane in enumerate(plan.lanes) for row, mask in lane.masks]
            )
            steps = self.executables.steps
            bucket = choose(
                steps, plan.kind, plan.num_rows, plan.num_tokens, plan.steps, plan.drafts
            )
            output = self._start(bucket, steps[bucket], plan)
            # The copy starts as soon as the step is done, not when `collect` asks for it.
            output.copy_to_host_async()
        if plan.number != MEASURED:
            self._count(bucket, plan)
        return Launched(bucket, output)

    def _start(self, bucket: Bucket, step: jax.stages.Compiled, plan: StepPlan) -> jax.Array:
        """Start a step and return its output, [A, size] int32."""
        groups = self.lowering.groups
        pack = partial(
            pack_lane,
            bucket=bucket,
            layout=upload_layout(bucket, groups, self.config.page_size),
            page_size=self.config.page_size,
            groups=groups,
            padding_row=self.config.max_batch,
        )
        upload = np.stack([pack(lane) for lane in plan.lanes])
        self._state.current, output = step(self._params, self._state.current, upload)
        return output

    def collect(self, plan: StepPlan, handle: Launched) -> StepOutput:
        """Return a step's results on the host; waits for the device."""
        output = np.asarray(handle.output)
        layout = download_layout(handle.bucket, self.spec.d_model)
        self.collected = handle.bucket
        lanes = zip(plan.lanes, output, strict=True)
        return StepOutput(tuple(unpack_lane(lane, layout, values) for lane, values in lanes))

    def wait(self) -> None:
        """Block until the device has done everything that was launched."""
        self._state.wait()

    # ---- figures

    def expert_load(self) -> np.ndarray:
        """Return how many tokens each expert has processed so far, modulo 2^32.

        uint32 [layers with experts, experts]; on several hosts, tokens of this one's lanes. Waits
        for the device. Raises EngineError where the model has no experts, or once it was closed.
        """
        load = self._state.current.load
        if load is None:
            raise EngineError("this model has no experts whose load could be read")
        # Shards that differ in another axis than the lane's are copies.
        lanes = {shard.index[0].start: shard.data for shard in load.addressable_shards}
        return np.concatenate([np.asarray(lane) for lane in lanes.values()]).sum(0, dtype=np.uint32)

    def _count(self, bucket: Bucket, plan: StepPlan) -> None:
        live = sum(len(lane.tokens) for lane in plan.lanes)
        computed = bucket.tokens * bucket.steps * self.config.lanes
        for padding in (self.padding[bucket], self.total):
            padding.launches += 1
            padding.live_tokens += live
            padding.computed_tokens += computed

    # ---- closing

    def close(self) -> None:
        """Free the device memory of parameters and state; a second call does nothing."""
        for leaf in jax.tree.leaves(self._params):
            leaf.delete()
        self._params = {}
        self.release_state()

    def release_state(self) -> None:
        """Free pages and rows, and forget what was compiled; a second call does nothing."""
        self._state.free()
        self._coming.clear()
        self.executables.clear()
