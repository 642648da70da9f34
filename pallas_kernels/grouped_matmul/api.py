"""The contract of the grouped matrix product: rows sorted by expert, each times its expert's
weight. No row is dropped.

An implementation is a module with the functions of `GroupedMatmul`. They work on one layer and one
shard's experts, inside shard_map. Rows come in blocks of one expert each (`grouping.arrange`), so
that a block is a dense product; an expert's last block is filled up with rows of padding.

What costs: blocks that hold rows, and the weights of experts that have some, each read once.
Padding may be anything, NaN included, and touches no other row; blocks without rows may be anything
and are not computed, and what is returned for either is nobody's. Products accumulate in float32;
float32 operands are multiplied at full precision.

A weight may be kept in 8 or 4 bits, with float32 scales [E, C, g, N]. With one per column, g = 1,
the scale multiplies the float32 sum. With g of them each K / g numbers of a column have their own,
and number times scale is rounded to x's dtype before it is multiplied. Weights are read as they are
kept; what they stand for is in memory at most an expert at a time.

Letters: M rows, n blocks, E experts, C parts of a weight that meet the same rows (2: gate and up;
1: down), K the dimension that is summed over, N columns, g scales of a column.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.errors import KernelError


class Groups(NamedTuple):
    """Whose the blocks of rows are. Those of an expert follow each other, those that hold rows come
    first.
    """

    experts: Int[Array, "n"]  # of every block; from `live` on any expert that exists
    live: Int[Array, ""]  # number of blocks that hold rows


@dataclass(frozen=True)
class Options:
    """What is fixed when a step is compiled.

    block: rows of a block, as `block_rows` wants it. out_dtype: of the result, rounded once, from
    float32. device_kind: of the chip that runs it, in the vendor's words.
    """

    block: int
    out_dtype: jnp.dtype
    device_kind: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "out_dtype", jnp.dtype(self.out_dtype))


class Demand(NamedTuple):
    """What else decides whether an implementation can take a product."""

    rows: int  # M
    experts: int  # E, of one shard
    parts: int  # C
    contracted: int  # K
    columns: int  # N
    dtype: jnp.dtype  # of rows, and of weights that have no scales
    device_kind: str
    numbers: jnp.dtype | None = None  # of weights that have some
    scales: int = 0  # g

    @property
    def stored_dtype(self) -> jnp.dtype:
        """Of weights as they lie in memory."""
        return self.dtype if self.numbers is None else self.numbers


class GroupedMatmul(Protocol):
    """The functions of an implementation's module."""

    @staticmethod
    def check(options: Options, demand: Demand) -> None:
        """KernelError when it cannot do this: which number, what the limit is and what changes
        it."""
        ...

    @staticmethod
    def block_rows(dtype: jnp.dtype, rows_per_expert: int) -> int:
        """The block that it wants for operands of this dtype, where an expert is expected to have
        so many rows.

        One that fits both products of an expert, whatever their size.
        """
        ...

    @staticmethod
    def multiply(
        x: Float[Array, "M K"],
        weight: Num[Array, "E C K N"],
        groups: Groups,
        options: Options,
        scales: Float[Array, "E C g N"] | None = None,
    ) -> Float[Array, "M C N"]:
        """Every row of the live blocks times its expert's weight, in options.out_dtype. M is n
        times the block.

        scales: of a weight in 8 or 4 bits.
        """
        ...


def check_rows(options: Options, demand: Demand) -> None:
    """What no implementation takes."""
    if options.block < 1 or demand.rows < 1 or demand.rows % options.block:
        raise KernelError(f"{demand.rows} rows cannot be cut into blocks of {options.block}")
    if not jnp.issubdtype(demand.dtype, jnp.floating):
        raise KernelError(
            f"rows and weights of {demand.dtype}: a grouped product is one of floating point "
            f"numbers"
        )
    if demand.scales and demand.contracted % demand.scales:
        raise KernelError(
            f"{demand.scales} scales for {demand.contracted} numbers of a column do not divide them"
        )


def demand_of(
    x: jax.Array, weight: jax.Array, scales: jax.Array | None, device_kind: str
) -> Demand:
    """What a product of these asks."""
    experts, parts, contracted, columns = weight.shape
    demand = Demand(len(x), experts, parts, contracted, columns, x.dtype, device_kind)
    return (
        demand if scales is None else demand._replace(numbers=weight.dtype, scales=scales.shape[2])
    )


def next_power_of_two(n: int) -> int:
    """That is no less than n."""
    return 1 << max(n - 1, 0).bit_length()
