"""Weights that read the same input, side by side, so that one matrix product does for all.

The fused axis is never split over the mesh: every kv head has its queries, its key and its value beside each other, so
that splitting kv heads splits all three alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True)
class Part:
    """Of the parameter `fused`, along its axis of that letter: one entry, or as many as `letter` has."""

    fused: str
    axis: str
    letter: str = ""


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
    }
)


def place(name: str, sizes: Mapping[str, int]) -> tuple[Part, slice]:
    """Where a weight lies along the fused axis; KeyError for one that is not fused."""
    part, begin = PARTS[name], 0
    for other, earlier in PARTS.items():
        size = sizes[earlier.letter] if earlier.letter else 1
        if other == name:
            break
        begin += size if earlier.fused == part.fused else 0
    return part, slice(begin, begin + size)
