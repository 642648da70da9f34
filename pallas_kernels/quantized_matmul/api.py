"""The contract of the quantized matrix product: activations times int4 numbers, with a scale for
each group of them.

An implementation is a module with the functions of `QuantizedMatmul`. They work on one shard,
inside shard_map where they are a kernel. What costs is the weight, read as it is kept: no
implementation but the reference writes it down in another precision. Numbers are exact in bfloat16,
products accumulate in float32.

Letters: T rows, K numbers that are summed over, g of them with one scale, G = K / g groups, N
columns: one dimension or several. Where a kernel wants a weight's dimensions in another order, they
lie so in memory already (sharding.params), and nothing moves.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int4

GROUPS = (32, 64, 128)  # numbers with one scale


class Demand(NamedTuple):
    """What decides whether an implementation can take a product, whatever its rows; of one
    shard."""

    contracted: int  # K
    columns: tuple[int, ...]  # N
    group: int  # g
    dtype: jnp.dtype  # of activations
    transposed: bool = False  # whether the weight is kept with K behind N


@dataclass(frozen=True)
class Options:
    """What is fixed when a step is compiled. device_kind: of the chip that runs it, in the vendor's
    words.
    """

    device_kind: str = ""


class QuantizedMatmul(Protocol):
    """The functions of an implementation's module."""

    @staticmethod
    def check(options: Options, demand: Demand) -> None:
        """KernelError when it cannot do this: which number, what the limit is and what changes
        it."""
        ...

    @staticmethod
    def multiply(
        x: Float[Array, "T K"],
        numbers: Int4[Array, "K *N"],
        scales: Float[Array, "G *N"],
        options: Options,
    ) -> Float[Array, "T *N"]:
        """Rows times the weight; float32."""
        ...
