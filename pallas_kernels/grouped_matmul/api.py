"""The contract of the grouped matrix product: rows sorted by expert, times their expert's weight.

No row is dropped. An implementation is a module with the functions of `GroupedMatmul`. The
functions work on one layer and one shard's experts, inside shard_map. Rows come in blocks of one
expert each (`grouping.arrange`), so that a block is a dense product; an expert's last block is
filled up with rows of padding.

The cost is that of blocks that hold rows, and of the weights of experts that have rows, each read
once. Rows of padding may hold anything, NaN included, and affect no other row; blocks without rows
may hold anything and are not computed. The results of either are unspecified. Products accumulate
in float32; float32 operands are multiplied at full precision.

A weight may be stored in 8 or 4 bits, with float32 scales [E, C, g, N]. With one scale per column,
g = 1, the scale multiplies the float32 sum. With more, each K / g numbers of a column share one,
and number times scale is rounded to x's dtype before it is multiplied. Weights are read as they are
stored; a dequantized weight is in memory for at most one expert at a time.

Letters:
  M  rows                                        n  blocks
  E  experts                                     C  parts of a weight that meet the same rows
  K  numbers that are summed over                   (2: gate and up; 1: down)
  N  columns                                     g  scales of a column
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxserve.pallas_kernels.errors import KernelError


class Groups(NamedTuple):
    """Experts of the blocks of rows: sorted by expert, blocks that hold rows first."""

    # The expert of every block; from entry `live` on, any expert that exists.
    experts: Int[Array, "n"]
    live: Int[Array, ""]  # number of blocks that hold rows


@dataclass(frozen=True)
class Options:
    """Parameters that are fixed when a step is compiled."""

    block: int  # rows of a block, from `block_rows`
    out_dtype: jnp.dtype  # of the result, rounded once, from float32
    device_kind: str = ""  # vendor's name of the chip that runs the product

    def __post_init__(self) -> None:
        object.__setattr__(self, "out_dtype", jnp.dtype(self.out_dtype))


class Demand(NamedTuple):
    """Sizes of a product that, with `Options`, decide whether an implementation can compute it."""

    rows: int  # M
    experts: int  # E of one shard
    parts: int  # C
    contracted: int  # K
    columns: int  # N
    dtype: jnp.dtype  # of rows, and of weights without scales
    device_kind: str
    numbers: jnp.dtype | None = None  # stored dtype of a weight with scales; None: without
    scales: int = 0  # g; 0: without

    @property
    def stored_dtype(self) -> jnp.dtype:
        """Return the dtype of weights as they lie in memory."""
        return self.dtype if self.numbers is None else self.numbers


class GroupedMatmul(Protocol):
    """Functions that the module of an implementation has."""

    @staticmethod
    def check(options: Options, demand: Demand) -> None:
        """Raise KernelError when the implementation cannot compute such a product.

        The message names the offending number, its limit and what changes it.
        """
        ...

    @staticmethod
    def block_rows(dtype: jnp.dtype, rows_per_expert: int) -> int:
        """Return the best block size, in rows, for operands of this dtype.

        The size fits both products of an expert, whatever their shapes.

        Args:
            rows_per_expert: Number of rows that an expert is expected to have.
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
        """Return every row of the live blocks times its expert's weight, in options.out_dtype.

        M is n times the block. A weight in 8 or 4 bits has `scales`.
        """
        ...


def check_rows(options: Options, demand: Demand) -> None:
    """Raise KernelError for rows, dtypes and scales that no implementation takes."""
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
    """Return the demand of a product of these arrays."""
    experts, parts, contracted, columns = weight.shape
    demand = Demand(len(x), experts, parts, contracted, columns, x.dtype, device_kind)
    if scales is None:
        return demand
    return demand._replace(numbers=weight.dtype, scales=scales.shape[2])


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
