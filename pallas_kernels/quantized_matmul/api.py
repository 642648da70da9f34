"""The contract of the quantized matrix product: activations times int4 numbers with group scales.

An implementation is a module with the functions of `QuantizedMatmul`. The functions work on one
shard, inside shard_map where they are a kernel. The cost is that of reading the weight as it is
stored: no implementation but the reference writes it in another precision. Numbers are exact in
bfloat16, and products accumulate in float32.

Letters:
  T  rows                                   K  numbers that are summed over
  N  columns, one dimension or several      g  numbers of K that share a scale
  G  groups, K / g

Where a kernel wants a weight's dimensions in another order, they lie so in memory already
(jaxserve.sharding.params), and nothing is moved.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int4

GROUPS = (32, 64, 128)  # sizes of groups: numbers that share a scale


class Demand(NamedTuple):
    """Sizes of a product, on one shard, that decide whether an implementation can compute it."""

    contracted: int  # K
    columns: tuple[int, ...]  # N
    group: int  # g
    dtype: jnp.dtype  # of activations
    transposed: bool = False  # the weight lies in memory with K behind N


@dataclass(frozen=True)
class Options:
    """Parameters that are fixed when a step is compiled."""

    device_kind: str = ""  # vendor's name of the chip that runs the product


class QuantizedMatmul(Protocol):
    """Functions that the module of an implementation has."""

    @staticmethod
    def check(options: Options, demand: Demand) -> None:
        """Raise KernelError when the implementation cannot compute such a product.

        The message names the offending number, its limit and what changes it.
        """
        ...

    @staticmethod
    def multiply(
        x: Float[Array, "T K"],
        numbers: Int4[Array, "K *N"],
        scales: Float[Array, "G *N"],
        options: Options,
    ) -> Float[Array, "T *N"]:
        """Return rows times the weight, in float32."""
        ...
