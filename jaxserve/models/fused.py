"""Weights that read the same input, side by side, so that one matrix product does for all.

The fused axis is never split over the mesh: every kv head has its queries, its key and its value
beside each other, so that splitting kv heads splits all three alike.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True)
class Part:
    """Of the parameter `fused`, along its axis of that letter: one entry, or as many as `letters`
    have.

    Several letters stand in parentheses.
    """

    fused: str
    axis: str
    letters: str = ""


# What families call a weight -> its place; the parts of a fused parameter lie in this order.
PARTS: Final[Mapping[str, Part]] = MappingProxyType(
    {
        "q": Part("qkv", "Q", "G"),
        "k": Part("qkv", "Q"),
        "v": Part("qkv", "Q"),
        "q_bias": Part("qkv_bias", "Q", "G"),
        "k_bias": Part("qkv_bias", "Q"),
        "v_bias": Part("qkv_bias", "Q"),
        "gate": Part("gate_up", "C"),
        "up": Part("gate_up", "C"),
        "gate_bias": Part("gate_up_bias", "C"),
        "up_bias": Part("gate_up_bias", "C"),
        "compress_query": Part("compress", "c", "y"),
        "compress_latent": Part("compress", "c", "m"),
        "compress_rotated": Part("compress", "c", "(ji)"),
        "query_plain": Part("query", "H", "u"),
        "query_rotated": Part("query", "H", "(ji)"),
    }
)


def place(name: str, sizes: Mapping[str, int]) -> dict[str, tuple[str, slice]]:
    """Along which letter a weight is a part of a fused one, its own letters there, and where it
    lies.
    """
    part, begin = PARTS[name], 0
    for other, earlier in PARTS.items():
        size = math.prod(sizes[letter] for letter in earlier.letters.strip("()"))
        if other == name:
            break
        begin += size if earlier.fused == part.fused else 0
    return {part.axis: (part.letters, slice(begin, begin + size))}
