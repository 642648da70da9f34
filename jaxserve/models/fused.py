"""Weights that read the same input, stored side by side so that one matrix product serves all.

The fused axis is never split over the mesh: every kv head has its queries, its key and its value
beside each other, so that splitting kv heads splits all three alike.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True)
class Part:
    """A weight's part of a fused parameter: entries along one axis."""

    fused: str  # name of the parameter
    axis: str  # letter of the parameter's fused axis
    # Dimensions of the weight along that axis, in parentheses if there are several; empty where the
    # weight is a single entry.
    letters: str = ""


# Family's name of a weight -> its part; the parts of a fused parameter lie in this order.
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
        "compress_query_bias": Part("compress_bias", "c", "y"),
        "compress_latent_bias": Part("compress_bias", "c", "m"),
        "compress_rotated_bias": Part("compress_bias", "c", "(ji)"),
        "state_query": Part("state_in", "e", "d"),
        "state_key": Part("state_in", "e", "d"),
        "state_value": Part("state_in", "e", "(rv)"),
        "state_gate": Part("state_in", "e", "(rv)"),
        "writing": Part("state_rates", "b", "r"),
        "decay": Part("state_rates", "b", "r"),
        "query_taps": Part("state_taps", "f", "d"),
        "key_taps": Part("state_taps", "f", "d"),
        "value_taps": Part("state_taps", "f", "(rv)"),
        "conv_before": Part("conv_in", "e", "f"),
        "conv_behind": Part("conv_in", "e", "f"),
        "conv_value": Part("conv_in", "e", "f"),
        "query_plain": Part("query", "H", "u"),
        "query_rotated": Part("query", "H", "(ji)"),
    }
)


# Parts of a head's dimensions that a row of a weight table can fill, where its tensor has the two
# numbers of a rotated pair beside each other: the rotated dimensions, first numbers before second
# ones, then the others. "H" is the whole head of a weight that is not rotated.
ROTATED: Final = "(ji)"
PLAIN: Final = "h"
WHOLE: Final = "H"


def head_slice(letters: str, sizes: Mapping[str, int]) -> dict[str, tuple[str, slice]]:
    """Map the dimensions of a head to the letters of such a part and to the entries it fills."""
    rotated = sizes["i"] * sizes["j"]
    entries = {ROTATED: slice(0, rotated), PLAIN: slice(rotated, None), WHOLE: slice(0, None)}
    begin, end, _ = entries[letters].indices(sizes["H"])
    return {WHOLE: (letters, slice(begin, end))}


def fused_slice(name: str, sizes: Mapping[str, int]) -> dict[str, tuple[str, slice]]:
    """Map the fused axis to a weight's own letters there and to the entries that it fills."""
    part = PARTS[name]
    together = {other: each for other, each in PARTS.items() if each.fused == part.fused}
    lengths = {
        other: math.prod(sizes[letter] for letter in each.letters.strip("()"))
        for other, each in together.items()
    }
    begin = sum(lengths[other] for other in takewhile(lambda other: other != name, together))
    return {part.axis: (part.letters, slice(begin, begin + lengths[name]))}
