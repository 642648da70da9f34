"""What lives on the device between steps: one donated pytree of fixed structure, pages and rows."""

from functools import partial
from types import ModuleType

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxserve.config import EngineConfig
from jaxserve.engine.batch import MAX_END_IDS
from jaxserve.engine.sampling import RowFields, RowSampling
from jaxserve.models.spec import ModelSpec
from jaxserve.request import MAX_BIASES
from pallas_kernels.paged_attention.reference import Pages
from sharding.rules import sharding


@flax.struct.dataclass
class Rows:
    """Everything the device keeps of the sequences in a lane's rows (A lanes, R rows)."""

    tables: tuple[Int[Array, "A R W"], ...]  # per page group
    length: Int[Array, "A R"]  # positions in pages
    token: Int[Array, "A R"]  # the newest token
    sampling: RowSampling  # fields [A, R, ...]
    fields: RowFields


@flax.struct.dataclass
class State:
    pages: tuple[Pages, ...]  # per layer, [A, P, K, Z, H] each
    rows: Rows


def abstract_state(spec: ModelSpec, config: EngineConfig, mesh: Mesh, kernel: ModuleType, dtype: jnp.dtype) -> State:
    """The state's shapes, dtypes and shardings."""
    shapes = jax.eval_shape(lambda: _zeros(spec, config, kernel, dtype))

    def sharded(axes: str | None, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        lanes_only = NamedSharding(mesh, PartitionSpec("data"))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(axes, x.shape, mesh) if axes else lanes_only)

    return State(
        pages=jax.tree.map(partial(sharded, "APKZH"), shapes.pages),
        rows=jax.tree.map(partial(sharded, None), shapes.rows),
    )


def new_state(abstract: State) -> State:
    """A state of zeros on the devices."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    make = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract), out_shardings=shardings)
    return make()


def _zeros(spec: ModelSpec, config: EngineConfig, kernel: ModuleType, dtype: jnp.dtype) -> State:
    lanes, groups = config.lanes, spec.page_groups()
    of_layer = {layer: at for at in zip(groups, config.pools, strict=True) for layer in at[0].layers}

    def layer_pages(layer: int) -> Pages:
        group, pool = of_layer[layer]
        one = kernel.allocate(pool.pages, group.kv_heads, config.page_size, group.head_dim, dtype)
        return jax.tree.map(lambda x: jnp.zeros((lanes, *x.shape), x.dtype), one)

    def field(*shape: int, dtype: type = np.int32) -> jax.Array:
        return jnp.zeros((lanes, config.max_batch, *shape), dtype)

    return State(
        pages=tuple(layer_pages(layer) for layer in range(spec.num_layers)),
        rows=Rows(
            tables=tuple(field(config.pages_per_row) for _ in groups),
            length=field(),
            token=field(),
            sampling=RowSampling(
                key=field(2, dtype=np.uint32),
                choice=field(),
                temperature=field(dtype=np.float32),
                top_k=field(),
                top_p=field(dtype=np.float32),
                min_p=field(dtype=np.float32),
                repetition=field(dtype=np.float32),
                presence=field(dtype=np.float32),
                frequency=field(dtype=np.float32),
                logprobs=field(),
                end_after=field(),
                end_ids=field(MAX_END_IDS),
                biased=field(),
                masked=field(),
                penalised=field(),
            ),
            fields=RowFields(
                counts=field(spec.vocab_size),
                bias_ids=field(MAX_BIASES),
                bias_values=field(MAX_BIASES, dtype=np.float32),
                mask=field(-(-spec.vocab_size // 32), dtype=np.uint32),
            ),
        ),
    )
