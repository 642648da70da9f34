"""One declaration per parameter: shape, logical axes, dtype. Sharding and initial values follow
from it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding

from sharding.mesh import platform
from sharding.rules import sharding

# Platforms with weights in `memory_order`. Elsewhere the order is that of the axes, which keeps a
# fused product one.
REORDERED: Final = frozenset({"tpu"})
SIDE_BY_SIDE: Final = frozenset({"gpu"})  # that have `ParamSpec.summed` last
LANES: Final = 128  # of a TPU's tiles: numbers of a row


@dataclass(frozen=True)
class ParamSpec:
    """A parameter before it exists.

    axes: one letter of the legend per dimension, e.g. "NHD". std: spread of random initial values,
    for tests and benchmarks; a norm weight has std 0 around `mean`. summed: of a weight in groups
    of int4, the letters that its product sums over: a GPU's kernel wants them beside each other.
    """

    axes: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    mean: float = 0.0
    std: float = 0.02
    summed: str = ""

    @property
    def nbytes(self) -> int:
        return stored_bytes(self.shape, self.dtype)

    def sharding(self, mesh: Mesh) -> NamedSharding:
        return sharding(self.axes, self.shape, mesh)

    def format(self, mesh: Mesh) -> Format:
        """Sharding, and the order of dimensions in the devices' memory where it must not be left to
        the compiler.

        That is where it is not that of the axes, or where rows do not fill a TPU's tiles: XLA turns
        such a weight over, and back in every step. Only there, since jax loads an array of a given
        layout on a slower way.
        """
        here, split = platform(mesh), self.sharding(mesh)
        order = tuple(range(len(self.axes)))
        if here in REORDERED:
            order = memory_order(self.axes)
        elif here in SIDE_BY_SIDE:
            order = summed_last(self.axes, self.summed)
        reordered = order != tuple(range(len(self.axes)))
        ragged = (
            here in REORDERED
            and len(self.axes) > 1
            and split.shard_shape(self.shape)[-1] % LANES != 0
        )
        return Format(Layout(order) if reordered or ragged else None, split)

    def abstract(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.format(mesh))


def stored_bytes(shape: Sequence[int], dtype: jnp.dtype) -> int:
    """Bytes that devices take for an array, without the padding of a chip's tiles: XLA packs two
    int4 into one.
    """
    return -(-math.prod(shape) * jax.dtypes.itemsize_bits(dtype) // 8)


def memory_order(axes: str) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest: of a weight that contracts D, D next to the last
    one.

    In the order of the axes XLA:TPU turns such a weight of three or more dimensions over, in every
    launch of a scan: its tiles lie over the last two dimensions, and its matrix unit contracts
    along the rows of a tile.
    """
    order = list(range(len(axes)))
    if "D" in axes[:-1]:
        order.insert(len(axes) - 2, order.pop(axes.index("D")))
    return tuple(order)


def summed_last(axes: str, summed: str) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest: in their order, those of `summed` behind the
    others.
    """
    return tuple(sorted(range(len(axes)), key=lambda at: axes[at] in summed))


def is_param_spec(leaf: object) -> bool:
    return isinstance(leaf, ParamSpec)


def map_specs(f: Callable[[ParamSpec], Any], specs: Any) -> Any:
    """Apply f to every ParamSpec of a nested structure."""
    return jax.tree.map(f, specs, is_leaf=is_param_spec)


def random_params(specs: Any, mesh: Mesh, seed: int = 0) -> Any:
    """Parameters of the declared shapes drawn on the devices, for tests and benchmarks.

    Values depend on the seed and the structure, not on the mesh. One compile per distinct
    ParamSpec.
    """
    leaves, treedef = jax.tree.flatten(specs, is_leaf=is_param_spec)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def draw(spec: ParamSpec, key: jax.Array) -> jax.Array:
        return (spec.mean + spec.std * jax.random.normal(key, spec.shape)).astype(spec.dtype)

    compiled = {
        spec: jax.jit(partial(draw, spec), out_shardings=spec.format(mesh)) for spec in set(leaves)
    }
    return jax.tree.unflatten(
        treedef, [compiled[spec](key) for spec, key in zip(leaves, keys, strict=True)]
    )
