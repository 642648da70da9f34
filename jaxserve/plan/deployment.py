"""Deployment of a model: what an engine would decide on devices that are not here."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, EngineOptions
from jaxserve.engine.buckets import Bucket, BucketPlan
from jaxserve.engine.build import plan_config, with_steps
from jaxserve.engine.device.lowering import Footprint, Lowering, abstract_params
from jaxserve.engine.device.memory import MemoryBudget, bytes_per_device, slot_bytes
from jaxserve.engine.device.steps import SCORE_TOKENS
from jaxserve.errors import ConfigError
from jaxserve.models.decoder import param_specs
from jaxserve.models.layer_kind import DeltaState
from jaxserve.models.matmul_w8a8 import check_chip
from jaxserve.models.quant import QuantScheme, scheme_in
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.devices import memory_limit, mesh_on
from jaxserve.plan.references import References
from jaxserve.plan.roofline import (
    REFERENCE,
    Case,
    Kernels,
    Work,
    sent_of,
    together,
    total,
    weights_of,
    work_of_attention,
    work_of_weights,
)
from jaxserve.plan.topology import Topology
from jaxserve.sharding.mesh import MeshSpec, platform
from jaxserve.sharding.params import is_param_spec

LOGITS = 8  # float32 arrays of a step's logits that a sampler was seen to keep at a time
STATES = 4  # copies of the rows' states of one layer that a step was seen to keep at a time
SLACK = 2**26  # bytes
# Bytes of a step's program for each layer, on a TPU that is nearly full; on others it is larger.
TPU_PROGRAM = 2**20


@dataclass(frozen=True)
class Target:
    """A model that is to be served, and the devices for it."""

    model: str
    spec: ModelSpec  # architecture of the checkpoint
    topology: Topology
    options: EngineOptions
    # Share of a GPU's memory that may be used; None is jax's default.
    memory_fraction: float | None = None


@dataclass(frozen=True)
class Deployment:
    """A model on a mesh, with the sizes of its engine."""

    target: Target
    spec: ModelSpec  # the target's architecture as these devices hold it, see ModelSpec.on
    axes: MeshSpec
    mesh: Mesh
    params: dict  # abstract values
    config: EngineConfig
    limit: int  # bytes that programs may use on one device

    @property
    def topology(self) -> Topology:
        return self.target.topology

    @property
    def dtype(self) -> jnp.dtype:
        return self.params["embed"].dtype

    @property
    def parameters(self) -> int:
        """Number of parameters of the checkpoint."""
        specs = jax.tree.leaves(param_specs(self.target.spec, self.dtype), is_leaf=is_param_spec)
        return sum(math.prod(spec.shape) for spec in specs)

    @property
    def scheme(self) -> QuantScheme | None:
        """Form of quantized weights; None where no weight is quantized."""
        return scheme_in(self.params)

    @property
    def weights(self) -> str:
        """Format of the weights in memory, as --weights names it."""
        return str(self.scheme or self.dtype)

    @cached_property
    def kernels(self) -> Kernels:
        """Implementations that the engine would choose for the products of weights."""
        lowering = self.lowering
        bound = frozenset(lowering.kernel_weights)
        return Kernels(lowering.grouped_matmul, bound, platform(self.mesh))

    @cached_property
    def by_reference(self) -> References:
        """Attention and states as far as they run without a kernel of a TPU or a GPU.

        What the references move on a CPU stays in its caches, so that it is not counted.
        """
        if platform(self.mesh) == "cpu":
            return References()
        attends = self.config.attention == REFERENCE
        advances = isinstance(self.spec.state, DeltaState) and self.lowering.recurrence == REFERENCE
        return References(self.dtype if attends else None, self.config.page_size, advances)

    @cached_property
    def references(self) -> list[str]:
        """Parts of a step that run without a kernel and move more bytes, by name.

        Attention, recurrence, and products on copies of weights: experts, and int4 in groups.
        """
        weights = weights_of(self.spec, self.dtype, self.scheme)
        copied = [w for w in weights if self.kernels.copies(w)]
        found = {"experts" if w.spec.axes.startswith("E") else "int4" for w in copied}
        if self.by_reference.queries is not None:
            found.add("attention")
        if self.by_reference.states:
            found.add("recurrence")
        return sorted(found)

    @cached_property
    def lowering(self) -> Lowering:
        return Lowering(self.spec, self.params, self.config, self.mesh)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return BucketPlan.of(self.config).buckets

    def largest(self) -> tuple[Bucket, ...]:
        """Return the widest step of each kind, which memory depends on, and the least decode."""
        widest = {(b.kind, b.steps): b for b in sorted(self.buckets)}
        return (min(self.buckets), *widest.values())

    def budget(self) -> MemoryBudget:
        """Return the memory of one device without steps."""
        weights = bytes_per_device(self.params)
        rows = bytes_per_device(self.lowering.state.rows)
        transit = self.lowering.page_io.transit_bytes
        return MemoryBudget(self.limit, weights, rows, transit=transit)

    def estimated_budget(self) -> MemoryBudget:
        """Return the memory of one device, with steps as `estimated_footprint` counts them."""
        footprint = partial(estimated_footprint, self.lowering)
        return with_steps(self.budget(), BucketPlan.of(self.config), footprint)

    def work(self, case: Case, *beside: Case) -> Work:
        """Return the work of one step with all cases in it; see roofline.work_of."""
        pages = jnp.dtype(self.config.page_dtype)
        attention = [
            work_of_attention(self.spec, pages, each, self.axes, self.by_reference)
            for each in (case, *beside)
        ]
        return total([self._work_of_weights(together(case, *beside)), *attention])

    @cached_property
    def _work_of_weights(self) -> Callable[[Case], Work]:
        """Function from a case without context to its work, with a cache.

        Counting takes milliseconds for a model of many layers.
        """
        return cache(
            lambda case: work_of_weights(
                self.spec, self.dtype, case, self.axes, self.scheme, self.kernels
            )
        )

    def sent(self, case: Case, *beside: Case) -> float:
        """Return the bytes that one device sends in a step with all cases in it."""
        return sent_of(self.spec, self.dtype, together(case, *beside), self.axes)


def deploy(
    target: Target,
    axes: MeshSpec,
    dtype: jnp.dtype,
    footprint: Callable[[Lowering, Bucket], Footprint] | None = Lowering.footprint,
    scheme: QuantScheme | None = None,
) -> Deployment:
    """Decide as the engine does.

    Args:
        dtype: Dtype of weights that are not quantized.
        footprint: Function that asks the compiler what a step takes; None counts it, and nothing
            of the deployment can be compiled.

    Raises:
        ConfigError: The mesh or an option cannot be used on these devices.
        MemoryLimitError: The model does not fit.
        ShardingError: Heads, experts or the vocabulary do not divide.
        ModelError: The weights cannot be quantized with `scheme`.
        ChipError: There is no compiler.
    """
    topology = target.topology
    held = target.spec.on(axes.tensor)
    check_mesh(topology, axes)
    mesh = mesh_on(topology, axes, compilers=footprint is not None)
    check_chip(scheme, mesh)
    limit = memory_limit(topology, mesh, target.memory_fraction)
    params = abstract_params(held, dtype, mesh, scheme)
    config = plan_config(
        held, params, mesh, target.options, limit, footprint or estimated_footprint
    )
    return Deployment(target, held, axes, mesh, params, config, limit)


def check_mesh(topology: Topology, axes: MeshSpec) -> None:
    """Raise ConfigError if the mesh leaves devices out, or asks for more."""
    if axes.size != topology.count:
        raise ConfigError(
            f"mesh {axes} (--data, --expert, --tensor) has {axes.size} devices; {topology.name} "
            f"has {topology.count}"
        )


def estimated_footprint(lowering: Lowering, bucket: Bucket) -> Footprint:
    """Return what a step needs beside its arguments, counted instead of compiled.

    Logits as often as the sampler needs them, two activations of the MLP's width, the rows' states
    of one layer, and a slack. It is more than compilers were seen to need.
    """
    spec = lowering.spec
    tensor = lowering.mesh.shape["tensor"]
    itemsize = lowering.params["embed"].dtype.itemsize
    logits = max(bucket.rows, SCORE_TOKENS if bucket.kind == "score" else 0) * spec.vocab_size * 4
    activations = 2 * bucket.tokens * 2 * spec.d_mlp * itemsize // tensor
    layers = max(len(spec.state_layers), 1)
    states = STATES * bucket.rows * slot_bytes(spec) // layers // tensor
    program = TPU_PROGRAM * spec.num_layers if platform(lowering.mesh) == "tpu" else 0
    return Footprint(LOGITS * logits + activations + states + SLACK, program)
