"""The contract of paged attention: inputs, results and permitted refusals of an implementation.

An implementation is a module with the functions of `PagedAttention`. The functions work on one
data-parallel rank (a lane), one layer and one shard's heads, inside shard_map. The memory layout of
pages is private to an implementation, except that their leading axis is P; `read` and `write_back`
convert from and to the canonical order.

Some inputs may hold anything, NaN included, and must not affect any result: the queries, keys and
values of tokens that belong to no row; and, for each row, every position that none of its queries
sees, whichever page its table entry names, even a page that another row writes in this step.

Products are of the queries' dtype and accumulate in float32 (float32 operands at full precision).
The softmax is float32, and its weights are rounded to the queries' dtype before they are multiplied
with the values.

Letters:
  T  tokens of the step, padding included      R  rows
  N  query heads of the shard                  K  kv heads of the shard
  H  numbers of a query or a key per head      V  numbers of a value per head
  P  pages of the pool                         Z  tokens of a page
  W  table entries of a row
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jaxtyping import Array, Float, Int

from jaxserve.pallas_kernels.errors import KernelError

# Largest finite values of the 8-bit dtypes that pages may have.
LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}
SCALE_BYTES = 4  # a scale is a float32


@dataclass(frozen=True)
class Layout:
    """Shape and dtype of a page, which holds page_size tokens of kv_heads heads."""

    kv_heads: int  # K
    head_dim: int  # H of queries and keys
    page_size: int  # Z
    dtype: jnp.dtype  # as stored; int8 and float8_e4m3fn carry a float32 scale per token and head
    # Set for pages that keep K alone. In latent pages (multi-head latent attention, DeepSeek-V2),
    # which have one head, a token's value is the first value_dim numbers of its K. With 0 there is
    # no value: such pages are read and written, and no query attends to them.
    value_dim: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if self.value_dim and not (self.kv_heads == 1 and 0 < self.value_dim <= self.head_dim):
            raise KernelError(
                f"latent pages have one head, whose first value_dim numbers are the value: "
                f"kv_heads {self.kv_heads}, head_dim {self.head_dim}, value_dim {self.value_dim}"
            )

    @property
    def keeps_values(self) -> bool:
        """Return whether pages hold V beside K."""
        return self.value_dim is None

    @property
    def scaled(self) -> bool:
        """Return whether the stored numbers carry scales, which 8-bit numbers do."""
        return self.dtype in LARGEST

    @property
    def bits(self) -> int:
        """Return the bits of one stored number, its share of a scale not counted."""
        return dtypes.itemsize_bits(self.dtype)

    @property
    def token_bytes(self) -> int:
        """Return the bytes that one token takes: K and V of all heads, with their scales."""
        vector = self.head_dim * self.bits // 8 + (SCALE_BYTES if self.scaled else 0)
        return self.kv_heads * vector * (2 if self.keeps_values else 1)

    @property
    def out_dim(self) -> int:
        """Return V, the numbers per head of attention's result."""
        return self.head_dim if self.value_dim is None else self.value_dim


class Pages(NamedTuple):
    """Arrays of one layer's page pool.

    In canonical order k and v are [P, K, Z, H] and their scales [P, K, Z] float32. v is None for
    latent pages (and for an implementation that stores V together with K); the scales are None
    unless the dtype has 8 bits. The tuple is a pytree of arrays, or of stand-ins for arrays:
    abstract values, shardings, or letters of axes.
    """

    k: Any
    v: Any = None
    k_scale: Any = None
    v_scale: Any = None


class Ragged(NamedTuple):
    """Positions of a step's tokens in rows and pages, for one page group.

    The model adds a leading axis A of lanes to every field.

    Rows are ordered: first those with one token (decodes), then those with more (prompts and drafts
    to verify), then empty ones. Row r owns tokens starts[r]:starts[r+1], the last of which is at
    position lengths[r] - 1. Every table entry is a page that exists; entries beyond a row's length,
    and with a window those before the first position that any of its queries sees, may name any
    page. No page is written by two rows in one step, nor read by one row and written by another.
    """

    # Entry i of a row names the page of its positions i * Z to (i + 1) * Z - 1.
    tables: Int[Array, "R W"]
    # KV positions of a row once this step's tokens are written; 0 for an empty row.
    lengths: Int[Array, "R"]
    starts: Int[Array, "R+1"]  # first token of each row; the last entry is their total
    split: Int[Array, "2"]  # the number of rows with exactly one token, and with any token
    # The page that token t is written to: its row's entry for its position. P, which is out of
    # range, stores nothing: it marks padding, and the token of a row that had ended before this
    # step, whose last position is in its pages already and whose result is not used.
    page: Int[Array, "T"]
    offset: Int[Array, "T"]  # position of the token within its page, 0 to Z - 1


@dataclass(frozen=True)
class Options:
    """Parameters that are fixed when a step is compiled."""

    layout: Layout
    scale: float
    # Number of positions that a query sees, its own being the last; None: all up to its own.
    window: int | None = None
    softcap: float | None = None  # scores s become cap * tanh(s / cap)
    # Largest number of tokens in a row; None: no limit. 1 is a decode step, in which T = R and
    # token r belongs to row r.
    max_row_tokens: int | None = None
    # Also return the natural logarithm of the softmax's denominator, including a sink's share.
    lse: bool = False
    device_kind: str = ""  # vendor's name of the chip that runs the step; selects tuned sizes


class Attended(NamedTuple):
    """Result of attention, and the pages after the step's tokens were written.

    out is in the queries' dtype and lse is float32; tokens that belong to no row have 0 and -inf.
    """

    out: Float[Array, "T N V"]  # V: layout.out_dim
    pages: Pages
    lse: Float[Array, "T N"] | None = None


class Demand(NamedTuple):
    """Sizes of a step that, with `Options`, decide whether an implementation can run it."""

    heads: int  # N
    rows: int  # R
    table_width: int  # W
    dtype: jnp.dtype  # of the queries
    device_kind: str


class PagedAttention(Protocol):
    """Functions that the module of an implementation has."""

    @staticmethod
    def check(options: Options, demand: Demand) -> None:
        """Raise KernelError when the implementation cannot run such a step.

        The message names the offending number, its limit and the flag that changes it.
        """
        ...

    @staticmethod
    def axes(layout: Layout) -> Pages:
        """Return the axis letters of each array as it lies in memory, one letter per dimension.

        The letters are those of the sharding rules; K is the dimension that is split over shards.
        """
        ...

    @staticmethod
    def allocate(num_pages: int, layout: Layout) -> Pages:
        """Return zeroed pages."""
        ...

    @staticmethod
    def attend(
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"] | None,
        pages: Pages,
        ragged: Ragged,
        options: Options,
        sinks: Float[Array, "N"] | None = None,
    ) -> Attended:
        """Write k and v into the pages, then attend from every query to its row up to its position.

        Args:
            sinks: Score per query head that takes part in the softmax and has no value (gpt-oss).
        """
        ...

    @staticmethod
    def read(pages: Pages, ids: Int[Array, "n"], layout: Layout) -> Pages:
        """Return copies of the pages `ids` in canonical order [n, Z, K, H], scales [n, Z, K].

        All `ids` have to be those of pages that exist.
        """
        ...

    @staticmethod
    def write_back(pages: Pages, ids: Int[Array, "n"], canonical: Pages, layout: Layout) -> Pages:
        """Store what `read` returned into the pages `ids`; id P drops its page."""
        ...


def quantize(x: Float[Array, "*n H"], dtype: jnp.dtype) -> tuple[Array, Float[Array, "*n"]]:
    """Return x as 8-bit numbers, and the float32 scale of each vector.

    Symmetric quantization: the scale maps a vector's largest magnitude to the dtype's largest
    value.
    """
    wide = x.astype(jnp.float32)
    largest = LARGEST[jnp.dtype(dtype)]
    # XLA rewrites a division by a constant to this product in some programs and not in others;
    # written as a product, all programs get the same bits.
    scale = jnp.max(jnp.abs(wide), axis=-1) * np.float32(1 / largest)
    # A vector of zeros has scale 0 and must not become NaN.
    unit = wide / jnp.where(scale > 0, scale, 1)[..., None]
    if dtype == jnp.int8:
        numbers = jnp.round(unit)
    else:
        # The scale is rounded, so a quotient may lie just above the range; float8_e4m3fn has no
        # infinity, and a number beyond its range may become NaN.
        numbers = jnp.clip(unit, -largest, largest)
    return numbers.astype(dtype), scale
