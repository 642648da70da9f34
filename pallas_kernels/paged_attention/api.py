"""The contract of paged attention: what every implementation is given, what it returns, and what it
may refuse.

An implementation is a module with the functions of `PagedAttention`. They work on one lane, one
layer and one shard's heads, inside shard_map. How pages lie in memory is an implementation's own
secret but for the leading axis P; `read` and `write_back` give and take them in canonical order.

What may be anything, NaN included, and must not leak into what is returned: queries, keys and
values of tokens that belong to no row; and for a row every position that none of its queries sees,
whatever page its entry names, also one that another row writes in this step. Products are of the
queries' dtype and accumulate in float32 (float32 operands at full precision); the softmax is
float32; weights are rounded to the queries' dtype before they meet the values.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.errors import KernelError

EIGHT_BITS = {
    jnp.dtype(jnp.int8): 127.0,
    jnp.dtype(jnp.float8_e4m3fn): 448.0,
}  # dtype -> its largest value


@dataclass(frozen=True)
class Layout:
    """What a page holds: page_size tokens of kv_heads heads.

    dtype: as stored; int8 and float8_e4m3fn carry a float32 scale per token and head. value_dim: of
    latent pages, which have no V: a token's value is the first value_dim numbers of its K
    (DeepSeek-V2's multi-head latent attention).
    """

    kv_heads: int  # K
    head_dim: int  # H of queries and keys
    page_size: int  # Z
    dtype: jnp.dtype
    value_dim: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if self.value_dim is not None and not (
            self.kv_heads == 1 and 0 < self.value_dim <= self.head_dim
        ):
            raise KernelError(
                f"latent pages have one head, whose first value_dim numbers are the value: "
                f"kv_heads {self.kv_heads}, head_dim {self.head_dim}, value_dim {self.value_dim}"
            )

    @property
    def scaled(self) -> bool:
        return self.dtype in EIGHT_BITS

    @property
    def out_dim(self) -> int:
        """Of attention's result, per head."""
        return self.head_dim if self.value_dim is None else self.value_dim


class Pages(NamedTuple):
    """One layer's pool. Canonically k and v are [P, K, Z, H] and their scales [P, K, Z] float32.

    v is None for latent pages (and for an implementation that keeps it with k), scales are None
    unless the dtype has 8 bits. A pytree of arrays, or of what stands for them: abstract values,
    shardings, letters of axes.
    """

    k: Any
    v: Any = None
    k_scale: Any = None
    v_scale: Any = None


class Ragged(NamedTuple):
    """Where the tokens of a step lie, for one page group. The model adds a leading axis A of lanes
    to every field.

    Rows come in this order: those with one token (decodes), those with more (prompts, verified
    drafts), empty ones. Row r owns tokens starts[r]:starts[r+1], the last of which is at position
    lengths[r] - 1. Entries of a table are pages that exist; beyond a row's length, and with a
    window before what any of its queries sees, any of them. No page is written by two rows in one
    step, nor read by a row and written by another.
    """

    tables: Int[Array, "R W"]  # page of every page-sized stretch of a row
    lengths: Int[
        Array, "R"
    ]  # kv positions of the row once this step's tokens are written; 0 for an empty row
    starts: Int[Array, "R+1"]
    split: Int[Array, "2"]  # how many rows have one token; how many have any
    # Where token t is written: its row's entry for its position; P (out of range): nothing is
    # stored. That is padding, or the token of a row that was done before this step: its last
    # position is in its pages, and its result nobody's.
    page: Int[Array, "T"]
    offset: Int[Array, "T"]  # its place in that page


@dataclass(frozen=True)
class Options:
    """What is fixed when a step is compiled.

    window: a query sees that many positions, its own the last; None: all before it. softcap: scores
    s become cap * tanh(s / cap). most: no row has more tokens than that; 1 is a decode step, where
    T = R and row r's is token r; None: any number. lse: return the natural logarithm of the
    softmax's denominator, a sink's share included. device_kind: of the chip that runs it, in the
    vendor's words, for sizes that were tuned for it.
    """

    layout: Layout
    scale: float
    window: int | None = None
    softcap: float | None = None
    max_row_tokens: int | None = None
    lse: bool = False
    device_kind: str = ""


class Attended(NamedTuple):
    """out is in the queries' dtype, zero for tokens that belong to no row; lse is float32, -inf for
    those.
    """

    out: Float[Array, "T N V"]  # V: layout.out_dim
    pages: Pages
    lse: Float[Array, "T N"] | None = None


class Demand(NamedTuple):
    """What else decides whether an implementation can take a step."""

    heads: int  # N, of one shard
    rows: int  # R
    table_width: int  # W
    dtype: jnp.dtype  # of queries
    device_kind: str


class PagedAttention(Protocol):
    """The functions of an implementation's module."""

    @staticmethod
    def check(options: Options, demand: Demand) -> None:
        """KernelError when it cannot do this: which number, what the limit is and which flag
        changes it.
        """
        ...

    @staticmethod
    def axes(layout: Layout) -> Pages:
        """One letter of the legend per dimension of each array, as it lies in memory: K is split
        over shards.
        """
        ...

    @staticmethod
    def allocate(num_pages: int, layout: Layout) -> Pages:
        """Zeroed pages."""
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
        """Write k and v into the pages, then let every query see its row's pages up to itself.

        sinks: per query head, a score that takes part in the softmax and has no value (gpt-oss).
        """
        ...

    @staticmethod
    def read(pages: Pages, ids: Int[Array, "n"], layout: Layout) -> Pages:
        """Copies of pages in canonical order [n, Z, K, H], scales [n, Z, K]; ids are pages that
        exist.
        """
        ...

    @staticmethod
    def write_back(pages: Pages, ids: Int[Array, "n"], canonical: Pages, layout: Layout) -> Pages:
        """The inverse of `read`; page P drops what is given for it."""
        ...


def quantize(x: Float[Array, "*n H"], dtype: jnp.dtype) -> tuple[Array, Float[Array, "*n"]]:
    """x as 8-bit numbers and their scale per vector: the largest magnitude becomes the dtype's
    largest value.
    """
    wide = x.astype(jnp.float32)
    largest = EIGHT_BITS[jnp.dtype(dtype)]
    scale = jnp.max(jnp.abs(wide), axis=-1) * np.float32(
        1 / largest
    )  # XLA rewrites a division by a constant to this, here and there
    unit = wide / jnp.where(scale > 0, scale, 1)[..., None]
    return (jnp.round(unit) if dtype == jnp.int8 else jnp.clip(unit, -largest, largest)).astype(
        dtype
    ), scale
