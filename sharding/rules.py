"""Which mesh axis splits which logical axis.

A logical axis is one letter of the project's legend, the same that names dimensions in einsum strings:

    B, R rows      T query tokens   S kv positions   N query heads   K kv heads   G = N / K   H head dim
    D model        F mlp            E experts        X experts per token          V vocab     L layers
    P pages        Z page size      A lanes (indices of the data axis)
    Q = G + 2      what a kv head has in a fused qkv weight: its queries, its key, its value
    C = 2          gate and up in a fused weight
"""

from collections.abc import Mapping

from jax.sharding import Mesh, NamedSharding, PartitionSpec


class ShardingError(ValueError):
    """An array or a mesh that cannot be laid out as asked."""


RULES: Mapping[str, str] = {"A": "data", "E": "expert", "V": "tensor", "N": "tensor", "K": "tensor", "F": "tensor"}


def partition(axes: str, shape: tuple[int, ...], mesh: Mesh, rules: Mapping[str, str] = RULES) -> PartitionSpec:
    """PartitionSpec of an array whose dimensions are the letters of `axes`.

    ShardingError when two dimensions ask for the same mesh axis, or when a size does not divide by its mesh axis.
    """
    if len(axes) != len(shape):
        raise ShardingError(f"axes {axes!r} name {len(axes)} dimensions; the shape {shape} has {len(shape)}")
    entries = [rules.get(letter) for letter in axes]
    used: dict[str, str] = {}
    for letter, size, axis in zip(axes, shape, entries, strict=True):
        if axis is None:
            continue
        if axis in used:
            raise ShardingError(f"axes {axes!r}: {used[axis]} and {letter} both map to mesh axis {axis!r}")
        used[axis] = letter
        if size % mesh.shape[axis]:
            raise ShardingError(
                f"axis {letter} of size {size} does not divide by mesh axis {axis!r} of size {mesh.shape[axis]} "
                f"(choose a --{axis} that divides {size})"
            )
    return PartitionSpec(*entries)


def sharding(axes: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """NamedSharding of an array whose dimensions are the letters of `axes`; errors as `partition`."""
    return NamedSharding(mesh, partition(axes, shape, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
