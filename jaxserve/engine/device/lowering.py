"""The steps of an engine as the compiler sees them: shapes, dtypes and shardings. Nothing is
allocated.

So it works for devices that are not here: the mesh may be one of a topology description.
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
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.batch import MASKED_AT_ONCE, Packed, admission_layout, upload_layout
from jaxserve.engine.device.drafting import Drafter
from jaxserve.engine.device.kernels.attention import choose_attention
from jaxserve.engine.device.kernels.grouped_matmul import choose_grouped_matmul
from jaxserve.engine.device.kernels.quantized_matmul import choose_quantized_matmul
from jaxserve.engine.device.memory import memory_errors
from jaxserve.engine.device.page_io import PageIO
from jaxserve.engine.device.sharded_model import Network
from jaxserve.engine.device.state import State, abstract_state
from jaxserve.engine.device.steps import StepBuilder, admit_row, set_bias, set_counts, set_masks
from jaxserve.errors import ConfigError
from jaxserve.models.decoder import param_specs
from jaxserve.models.quant import QuantScheme, scheme_in
from jaxserve.models.spec import ModelSpec
from jaxserve.request import MAX_BIASES
from pallas_kernels import dispatch
from sharding.mesh import spans_hosts
from sharding.params import map_specs
from sharding.rules import DP_AXES, replicated


class Footprint(NamedTuple):
    """Bytes of one device that a step takes beside its arguments: while it runs, and as long as it
    is loaded.
    """

    temporaries: int
    program: int


class Lowering:
    """Lowers what an engine compiles. params: abstract values with shardings, in the structure of
    param_specs.

    drafter: of tokens that the device drafts.
    """

    def __init__(
        self,
        spec: ModelSpec,
        params: dict,
        config: EngineConfig,
        mesh: Mesh,
        drafter: Drafter | None = None,
    ):
        self.spec, self.config, self.mesh = spec, config, mesh
        self.params = params | {"drafter": drafter.abstract} if drafter else params
        dtype: jnp.dtype = params["embed"].dtype
        self.attention = choose_attention(spec, config, mesh, dtype)
        kernel = dispatch.IMPLEMENTATIONS[self.attention]
        self.page_groups = len(spec.page_groups())
        self.admission: Packed = admission_layout(self.page_groups, config.pages_per_row)
        self.state: State = replace(
            abstract_state(spec, config, mesh, kernel), drafter=drafter.kept if drafter else None
        )
        self.form = scheme_in(params)
        self.grouped_matmul = choose_grouped_matmul(spec, config, mesh, dtype, self.form)
        self.placed = choose_quantized_matmul(spec, config, mesh, dtype, self.form)
        grouped = dispatch.GROUPED[self.grouped_matmul]
        stored = jnp.dtype(config.page_dtype)
        network = Network(spec, mesh, kernel, grouped, self.placed, config.page_size, stored)
        self._builder = StepBuilder(network, drafter)
        self.page_io = PageIO(spec, config, mesh, kernel, dtype)

    @cached_property
    def _state_shardings(self) -> Any:
        return jax.tree.map(lambda x: x.sharding, self.state)

    def step(self, bucket: Bucket) -> jax.stages.Lowered:
        """(params, state, upload [A, n]) -> (state, download [A, m]), the state donated.

        On a mesh over several hosts every one of them gets the whole download.
        """
        lane_axis = NamedSharding(self.mesh, PartitionSpec(DP_AXES))
        size = upload_layout(bucket, self.page_groups, self.config.page_size).size
        upload = jax.ShapeDtypeStruct((self.config.lanes, size), np.int32, sharding=lane_axis)
        download = replicated(self.mesh) if spans_hosts(self.mesh) else lane_axis
        shardings = (self._state_shardings, download)
        step = jax.jit(self._builder.step(bucket), donate_argnums=1, out_shardings=shardings)
        return step.lower(self.params, self.state, upload)

    @property
    def masks_shape(self) -> tuple[int, int, int]:
        """Rows that are written at once, places where one of them samples, words of 32 tokens."""
        return MASKED_AT_ONCE, 1 + self.config.draft_tokens, -(-self.spec.vocab_size // 32)

    def writers(self) -> dict[str, jax.stages.Lowered]:
        """What writes a row's fields, by name: (state, *values) -> state, the state donated."""
        vocab = self.spec.vocab_size

        def array(*shape: int, dtype: type = np.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(self.mesh))

        writers: dict[str, tuple[Callable, tuple]] = {
            "admit_row": (partial(admit_row, self.admission), (array(self.admission.size),)),
            "set_counts": (set_counts, (array(2), array(vocab))),
            "set_bias": (
                set_bias,
                (array(2), array(MAX_BIASES), array(MAX_BIASES, dtype=np.float32)),
            ),
            "set_masks": (
                set_masks,
                (array(MASKED_AT_ONCE, 2), array(*self.masks_shape, dtype=np.uint32)),
            ),
        }
        return {
            name: jax.jit(write, donate_argnums=0, out_shardings=self._state_shardings).lower(
                self.state, *values
            )
            for name, (write, values) in writers.items()
        }

    def page_programs(self) -> dict[str, jax.stages.Lowered]:
        """What reads and writes pages for other engines, by name, where they are exchanged."""
        return dict(self.page_io.lowered(self.state.pages)) if self.config.page_exchange else {}

    def footprint(self, bucket: Bucket) -> Footprint:
        """Of a step of this shape, as the compiler says; compiles it. MemoryLimitError when the
        compiler refuses.
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
    spec: ModelSpec, dtype: jnp.dtype, mesh: Mesh, form: QuantScheme | None = None
) -> dict:
    """Shapes, dtypes, shardings and memory orders of parameters, as declared: whether they are here
    or not.

    Those of the arrays would name a TPU's tiles as well: the same step, but another key of jax's
    cache than that of a step compiled ahead (jaxserve/plan/bundle.py). form: of quantized weights.
    ShardingError where the mesh does not divide them.
    """
    return map_specs(lambda param: param.abstract(mesh), param_specs(spec, dtype, form))
