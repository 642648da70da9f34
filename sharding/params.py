"""Declarations of parameters: shape, logical axes and dtype, from which sharding follows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding

from jaxserve.sharding.mesh import platform
from jaxserve.sharding.rules import sharding

# Platforms whose weights are stored in `memory_order`. Elsewhere the order is that of the axes,
# with which XLA keeps a fused product in one piece.
REORDERED: Final = frozenset({"tpu"})
SUMMED_LAST: Final = frozenset({"gpu"})  # platforms that store the axes of `ParamSpec.summed` last
LANES: Final = 128  # numbers in a row of a TPU's tile


@dataclass(frozen=True)
class ParamSpec:
    """The declaration of a parameter."""

    axes: str  # one letter of the legend in sharding/rules.py per dimension, e.g. "NHD"
    shape: tuple[int, ...]
    dtype: jnp.dtype
    # Distribution of random initial values, for tests and benchmarks; norm weights have std 0.
    mean: float = 0.0
    std: float = 0.02
    # Letters that the product of an int4 weight quantized in groups sums over, which a GPU's kernel
    # needs contiguous in memory; else empty.
    summed: str = ""

    @property
    def nbytes(self) -> int:
        return stored_bytes(self.shape, self.dtype)

    def sharding(self, mesh: Mesh) -> NamedSharding:
        return sharding(self.axes, self.shape, mesh)

    def format(self, mesh: Mesh) -> Format:
        """Return the sharding, with a memory layout where the compiler's choice would be slow.

        A layout is given where the dimensions' order in memory is not that of the axes, or where
        rows do not fill a TPU's tiles: XLA would transpose such a weight and back in every step.
        Elsewhere none is given, since jax loads arrays of a given layout more slowly.
        """
        here = platform(mesh)
        split = self.sharding(mesh)
        unchanged = tuple(range(len(self.axes)))
        order = unchanged
        if here in REORDERED:
            order = memory_order(self.axes)
        elif here in SUMMED_LAST:
            order = summed_last(self.axes, self.summed)
        reordered = order != unchanged
        ragged = (
            here in REORDERED
            and len(self.axes) > 1
            and split.shard_shape(self.shape)[-1] % LANES != 0
        )
        return Format(Layout(order) if reordered or ragged else None, split)

    def abstract(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """Return the parameter's shape, dtype and format, to compile with."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.format(mesh))


def stored_bytes(shape: Sequence[int], dtype: jnp.dtype) -> int:
    """Return the bytes of an array on a device, without the padding of a chip's tiles.

    XLA packs two int4 numbers into a byte.
    """
    return -(-math.prod(shape) * jax.dtypes.itemsize_bits(dtype) // 8)


def memory_order(axes: str) -> tuple[int, ...]:
    """Return the dimensions from the slowest to the fastest for a TPU: D second to last.

    A TPU's tiles lie over the last two dimensions, and its matrix unit contracts along the rows of
    a tile. With D further out, XLA:TPU would transpose a weight of three or more dimensions in
    every launch of a scan.
    """
    order = list(range(len(axes)))
    if "D" in axes[:-1]:
        order.insert(len(axes) - 2, order.pop(axes.index("D")))
    return tuple(order)


def summed_last(axes: str, summed: str) -> tuple[int, ...]:
    """Return the dimensions from the slowest to the fastest with those of `summed` last."""
    return tuple(sorted(range(len(axes)), key=lambda at: axes[at] in summed))


def is_param_spec(leaf: object) -> bool:
    return isinstance(leaf, ParamSpec)


def map_specs(f: Callable[[ParamSpec], Any], specs: Any) -> Any:
    """Apply f to every ParamSpec of a nested structure."""
    return jax.tree.map(f, specs, is_leaf=is_param_spec)


def random_params(specs: Any, mesh: Mesh, seed: int = 0) -> Any:
    """Draw parameters of the declared shapes on the devices, for tests and benchmarks.

    Values depend on the seed and the structure, not on the mesh. Each distinct ParamSpec is
    compiled once.
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
