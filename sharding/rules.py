"""Rules that map logical axes of arrays to mesh axes.

A logical axis is one letter of the project's legend, the same that names dimensions in einsum
strings:

    B, R rows      T query tokens   S kv positions   N query heads   K kv heads   G = N / K
    H head dim     D model          F mlp            E experts       X experts per token
    V vocab        L layers
    P pages        Z page size      A lanes (indices of the mesh axes data and expert)
    Q = G + 2      entries of a kv head in a fused qkv weight: its queries, its key, its value
    C = 2          gate and up in a fused weight
    O = E          experts that a router scores: all of them, on every device
    g = 1          dimension of a quantized weight's scales in place of those summed over
    i, j = 2       pairs of rotated dimensions of a head
    h = H - 2i     dimensions of a head that are not rotated

Multi-head latent attention adds:

    y, m ranks of compressed queries, and of compressed keys and values
    u    dimensions of a head that are not rotated
    w    dimensions of a head's value
    c = y + m + 2i numbers that a token is compressed to

Layers with a recurrent state add:

    k    key heads       r  value heads of a key head     d, v  numbers of a key and of a value
    f = 2d + rv          numbers of a key head that are convolved: its query, its key, its values
    e = f + rv           those, and the gates of its values
    b = 2r               writing strengths of a key head's value heads, then their decays
    t    taps of the convolution                          s     slots, each with one state

and where the convolution is all of such a layer:

    k    heads           f  numbers of a head             e = 3f  those, and the gates around them
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.sharding.errors import ShardingError

Rules = Mapping[str, tuple[str, ...]]  # letter -> mesh axes
DP_AXES: Final = ("data", "expert")  # mesh axes whose indices are lanes, with rows of their own
RULES: Final[Rules] = MappingProxyType(
    {
        "A": DP_AXES,
        "E": ("expert",),
        "V": ("tensor",),
        "N": ("tensor",),
        "K": ("tensor",),
        "F": ("tensor",),
        "k": ("tensor",),
    }
)
WORDS: Final[Mapping[str, str]] = MappingProxyType(  # for error messages
    {
        "A": "lanes",
        "E": "experts",
        "V": "vocabulary",
        "N": "query heads",
        "K": "kv heads",
        "F": "mlp",
        "k": "heads of layers with a state",
    }
)


def partition(axes: str, shape: tuple[int, ...], mesh: Mesh, rules: Rules = RULES) -> PartitionSpec:
    """Return the PartitionSpec of an array whose dimensions are the letters of `axes`.

    ShardingError when two dimensions map to the same mesh axis, or when a size does not divide by
    its mesh axes.
    """
    if len(axes) != len(shape):
        raise ShardingError(
            f"axes {axes!r} name {len(axes)} dimensions; the shape {shape} has {len(shape)}"
        )
    used: dict[str, str] = {}
    for letter, size in zip(axes, shape, strict=True):
        for axis in rules.get(letter, ()):
            if axis in used:
                raise ShardingError(
                    f"axes {axes!r}: {used[axis]} and {letter} both map to mesh axis {axis!r}"
                )
            used[axis] = letter
        count = shards(letter, mesh, rules)
        if size % count:
            names = rules[letter]
            mesh_axes = " x ".join(map(repr, names))
            flags = " and a --".join(names)
            raise ShardingError(
                f"axis {letter} ({WORDS[letter]}) of size {size} does not divide by mesh axis "
                f"{mesh_axes} of size {count} (choose a --{flags} that divides {size})"
            )
    return PartitionSpec(*(_entry(rules.get(letter, ())) for letter in axes))


def _entry(mesh_axes: tuple[str, ...]) -> tuple[str, ...] | str | None:
    """Return a PartitionSpec's entry in its shortest form: jax compares entries literally."""
    if len(mesh_axes) > 1:
        return mesh_axes
    return mesh_axes[0] if mesh_axes else None


def shards(letter: str, mesh: Mesh, rules: Rules = RULES) -> int:
    """Return into how many parts the mesh splits a dimension of this letter."""
    return math.prod(mesh.shape[axis] for axis in rules.get(letter, ()))


def sharding(axes: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Return the NamedSharding of an array with these axes; errors as `partition`."""
    return NamedSharding(mesh, partition(axes, shape, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())
