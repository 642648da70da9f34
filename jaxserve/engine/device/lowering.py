"""Lowering of everything that an engine compiles, from shapes, dtypes and shardings alone.

Nothing is allocated, so the mesh may be that of a topology description, for absent devices.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import EngineConfig
from jaxserve.cpu_kernels.products import CpuProduct
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.batch import upload_layout
from jaxserve.engine.device.compiler_options import step_options
from jaxserve.engine.device.drafting import Drafter
from jaxserve.engine.device.kernels.choice import (
    choose_attention,
    choose_grouped_matmul,
    choose_quantized_matmul,
    choose_recurrence,
)
from jaxserve.engine.device.memory import memory_errors
from jaxserve.engine.device.packed import Packed
from jaxserve.engine.device.page_io import PageIO
from jaxserve.engine.device.row_packing import MASKED_AT_ONCE, admission_layout
from jaxserve.engine.device.row_writers import admit_row, set_bias, set_counts, set_masks
from jaxserve.engine.device.sharded_model import ShardedModel
from jaxserve.engine.device.state import State, abstract_state
from jaxserve.engine.device.steps import StepBuilder
from jaxserve.errors import ConfigError
from jaxserve.models.decoder import param_specs
from jaxserve.models.quant import QuantScheme, scheme_in
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels import dispatch
from jaxserve.sampling_params import MAX_BIASES
from jaxserve.sharding.mesh import platform, spans_hosts
from jaxserve.sharding.params import map_specs
from jaxserve.sharding.rules import DP_AXES, replicated


class Footprint(NamedTuple):
    """Bytes of one device that a step takes beside its arguments."""

    temporaries: int  # while the step runs
    program: int  # as long as the step is loaded


class Lowering:
    """Lowering of an engine's steps, row writers and page programs, with the kernels they use.

    Everything is lowered with types of 32 bits, whatever jax_enable_x64 says, which belongs to the
    program around the engine, and with the precision of products that jax has when this object is
    made: threads that compile later do not have the caller's.

    Args:
        params: Abstract values with shardings, in the structure of param_specs.
        drafter: Drafter of the tokens that the device drafts, if it does.

    Raises:
        KernelError: A kernel that the configuration names cannot run what the engine needs.
    """

    @jax.enable_x64(False)
    def __init__(
        self,
        spec: ModelSpec,
        params: dict,
        config: EngineConfig,
        mesh: Mesh,
        drafter: Drafter | None = None,
    ):
        self._precision = jax.config.jax_default_matmul_precision
        self.spec = spec
        self.config = config
        self.mesh = mesh
        self.params = params | {"drafter": drafter.abstract_params} if drafter else params
        dtype: jnp.dtype = params["embed"].dtype
        self.attention = choose_attention(spec, config, mesh, dtype)
        kernel = dispatch.IMPLEMENTATIONS[self.attention]
        self.groups = spec.num_groups
        self.admission: Packed = admission_layout(self.groups, config.pages_per_row)
        self.state: State = replace(
            abstract_state(spec, config, mesh, kernel),
            drafter=drafter.abstract_state if drafter else None,
        )
        self.scheme = scheme_in(params)
        self.grouped_matmul = choose_grouped_matmul(spec, config, mesh, dtype, self.scheme)
        self.kernel_weights = choose_quantized_matmul(spec, config, mesh, dtype, self.scheme)
        self.recurrence = choose_recurrence(spec, config, mesh)
        model = ShardedModel(
            spec=spec,
            mesh=mesh,
            attention=kernel,
            grouped_matmul=dispatch.GROUPED[self.grouped_matmul],
            kernel_weights=self.kernel_weights,
            gated_delta=dispatch.RECURRENCES[self.recurrence],
            page_size=config.page_size,
            page_dtype=jnp.dtype(config.page_dtype),
        )
        self._builder = StepBuilder(model, drafter)
        self.page_io = PageIO(spec, config, mesh, kernel, dtype)

    @cached_property
    def _state_shardings(self) -> Any:
        return jax.tree.map(lambda x: x.sharding, self.state)

    @jax.enable_x64(False)
    def step(self, bucket: Bucket) -> jax.stages.Lowered:
        """Lower a step: (params, state, upload [A, n]) -> (state, download [A, m]).

        The state is donated. On a mesh over several hosts each host gets the whole download.
        """
        lane_axis = NamedSharding(self.mesh, PartitionSpec(DP_AXES))
        size = upload_layout(bucket, self.groups, self.config.page_size).size
        upload = jax.ShapeDtypeStruct((self.config.lanes, size), np.int32, sharding=lane_axis)
        download = replicated(self.mesh) if spans_hosts(self.mesh) else lane_axis
        shardings = (self._state_shardings, download)
        step = jax.jit(
            self._builder.step(bucket),
            donate_argnums=1,
            out_shardings=shardings,
            compiler_options=dict(step_options(platform(self.mesh), bucket.steps)),
        )
        with jax.default_matmul_precision(self._precision):
            return step.lower(self.params, self.state, upload)

    @property
    def masks_shape(self) -> tuple[int, int, int]:
        """Shape of set_masks: rows per launch, sampling slots, words of 32 tokens."""
        return MASKED_AT_ONCE, 1 + self.config.draft_tokens, -(-self.spec.vocab_size // 32)

    @jax.enable_x64(False)
    def writers(self) -> dict[str, jax.stages.Lowered]:
        """Lower the row writers, by name: (state, *values) -> state, the state donated."""
        vocab = self.spec.vocab_size

        def array(*shape: int, dtype: type = np.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(self.mesh))

        bias = (array(2), array(MAX_BIASES), array(MAX_BIASES, dtype=np.float32))
        masks = (array(MASKED_AT_ONCE, 2), array(*self.masks_shape, dtype=np.uint32))
        writers: dict[str, tuple[Callable, tuple]] = {
            "admit_row": (partial(admit_row, self.admission), (array(self.admission.size),)),
            "set_counts": (set_counts, (array(2), array(vocab))),
            "set_bias": (set_bias, bias),
            "set_masks": (set_masks, masks),
        }
        return {
            name: jax.jit(write, donate_argnums=0, out_shardings=self._state_shardings).lower(
                self.state, *values
            )
            for name, (write, values) in writers.items()
        }

    @jax.enable_x64(False)
    def page_programs(self) -> dict[str, jax.stages.Lowered]:
        """Lower the programs for KV transfer, by name; none without config.page_exchange."""
        return dict(self.page_io.lower(self.state.kept)) if self.config.page_exchange else {}

    def footprint(self, bucket: Bucket) -> Footprint:
        """Compile the step of this shape and return what the compiler says it takes.

        Raises MemoryLimitError when the compiler finds that it cannot fit, ConfigError when the
        compiler gives no figures.
        """
        with memory_errors(str(bucket)):
            compiled = self.step(bucket).compile()
        analysis = compiled.memory_analysis()
        if analysis is None:
            raise ConfigError(
                "the compiler reports no memory figures for this device; give --cache-tokens"
            )
        return Footprint(analysis.temp_size_in_bytes, analysis.generated_code_size_in_bytes)


def abstract_params(
    spec: ModelSpec,
    dtype: jnp.dtype,
    mesh: Mesh,
    scheme: QuantScheme | None = None,
    product: CpuProduct | None = None,
) -> dict:
    """Return shapes, dtypes, shardings and memory orders of the parameters, as declared.

    `product` is as in param_specs.

    Raises ShardingError where the mesh does not divide them.
    """
    # Values taken from the arrays would name a TPU's tiles as well. That gives the same step, but
    # under another key of jax's cache than a step compiled ahead (jaxserve/plan/bundle.py).
    declared = param_specs(spec, dtype, scheme, product)
    return map_specs(lambda param: param.abstract(mesh), declared)
