"""Which mesh axis splits which logical axis.

A logical axis is one letter of the project's legend, the same that names dimensions in einsum
strings:

    B, R rows      T query tokens   S kv positions   N query heads   K kv heads   G = N / K
    H head dim     D model          F mlp            E experts       X experts per token
    V vocab        L layers
    P pages        Z page size      A lanes (indices of the data and expert axes)
    Q = G + 2      what a kv head has in a fused qkv weight: its queries, its key, its value
    C = 2          gate and up in a fused weight
    O = E          the experts that a router scores: all of them, on every device
    g = 1          what the scales of a quantized weight have where the weight is summed over

Of multi-head latent attention:

    y, m ranks of compressed queries, and of compressed keys and values
    i, j = 2 pairs of rotated dimensions
    u    dimensions of a head that are not rotated
    w    dimensions of a head's value
    c = y + m + 2i what a token is compressed to
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from jax.sharding import Mesh, NamedSharding, PartitionSpec


class ShardingError(ValueError):
    """An array or a mesh that cannot be laid out as asked."""


Rules = Mapping[str, tuple[str, ...]]
LANES: Final = ("data", "expert")
RULES: Final[Rules] = MappingProxyType(
    {
        "A": LANES,
        "E": ("expert",),
        "V": ("tensor",),
        "N": ("tensor",),
        "K": ("tensor",),
        "F": ("tensor",),
    }
)
WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "A": "lanes",
        "E": "experts",
        "V": "vocabulary",
        "N": "query heads",
        "K": "kv heads",
        "F": "mlp",
    }
)


def partition(axes: str, shape: tuple[int, ...], mesh: Mesh, rules: Rules = RULES) -> PartitionSpec:
    """PartitionSpec of an array whose dimensions are the letters of `axes`.

    ShardingError when two dimensions ask for the same mesh axis, or when a size does not divide by
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
        if size % (count := shards(letter, mesh, rules)):
            names = rules[letter]
            asked, flags = " x ".join(map(repr, names)), " and a --".join(names)
            raise ShardingError(
                f"axis {letter} ({WORDS[letter]}) of size {size} does not divide by mesh axis "
                f"{asked} of size {count} "
                f"(choose a --{flags} that divides {size})"
            )
    names = (rules.get(letter, ()) for letter in axes)
    return PartitionSpec(
        *(entry if len(entry) > 1 else entry[0] if entry else None for entry in names)
    )


def shards(letter: str, mesh: Mesh, rules: Rules = RULES) -> int:
    """Into how many pieces a dimension of this letter is split."""
    return math.prod(mesh.shape[axis] for axis in rules.get(letter, ()))


def sharding(axes: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """NamedSharding of an array whose dimensions are the letters of `axes`; errors as
    `partition`."""
    return NamedSharding(mesh, partition(axes, shape, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
