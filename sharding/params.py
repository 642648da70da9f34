"""One declaration per parameter: shape, logical axes, dtype. Sharding and initial values follow from it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sharding.rules import sharding


@dataclass(frozen=True)
class ParamSpec:
    """A parameter before it exists.

    axes: one letter of the legend per dimension, e.g. "NHD". std: spread of random initial values, for tests and
    benchmarks; a norm weight has std 0 around `mean`.
    """

    axes: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    mean: float = 0.0
    std: float = 0.02

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    def sharding(self, mesh: Mesh) -> NamedSharding:
        return sharding(self.axes, self.shape, mesh)

    def abstract(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding(mesh))


def is_param_spec(leaf: object) -> bool:
    return isinstance(leaf, ParamSpec)


def map_specs(f: Callable[[ParamSpec], Any], specs: Any) -> Any:
    """Apply f to every ParamSpec of a nested structure."""
    return jax.tree.map(f, specs, is_leaf=is_param_spec)


def random_params(specs: Any, mesh: Mesh, seed: int = 0) -> Any:
    """Parameters of the declared shapes drawn on the devices, for tests and benchmarks.

    Values depend on the seed and the structure, not on the mesh. One compile per distinct ParamSpec.
    """
    leaves, treedef = jax.tree.flatten(specs, is_leaf=is_param_spec)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def draw(spec: ParamSpec, key: jax.Array) -> jax.Array:
        return (spec.mean + spec.std * jax.random.normal(key, spec.shape)).astype(spec.dtype)

    compiled = {spec: jax.jit(partial(draw, spec), out_shardings=spec.sharding(mesh)) for spec in set(leaves)}
    return jax.tree.unflatten(treedef, [compiled[spec](key) for spec, key in zip(leaves, keys, strict=True)])
