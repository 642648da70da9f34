"""Prompts with the gated delta rule on TPUs, in Pallas: a state stays in vector memory for its row.

The grid goes over key heads and, for each of them, over the blocks of 128 tokens of all rows, whose
number is the device's own. Blocks of a row follow each other, and their state is the same block of
the output: it is read before the first of them and written behind the last. Within a block it is
the form of chunked.py.

A block's first token lies at a multiple of eight tokens, the height of a register tile: XLA moves
the tokens so that every row begins at one.
"""

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxserve.pallas_kernels.gated_delta.api import Heads
from jaxserve.pallas_kernels.gated_delta.row_blocks import cut
from jaxserve.pallas_kernels.grouped_matmul.tpu_plan import SUBLANES
from jaxserve.pallas_kernels.short_convolution.api import Chunks

BLOCK: Final = 128  # tokens of a block: as many as a register tile has lanes


class Visits(NamedTuple):
    """Blocks of tokens in the order of rows; only those that exist are visited."""

    read: Int[Array, "V"]  # slot of the state before the row
    write: Int[Array, "V"]  # slot of the state behind the row
    first: Int[Array, "V"]  # 1 for the first block of a row
    empty: Int[Array, "V"]  # 1 for a row whose state before is empty
    begin: Int[Array, "V"]  # eights of tokens before the block's first
    size: Int[Array, "V"]  # tokens of the block


class Places(NamedTuple):
    """Places of tokens on the way to the kernel, and of their answers."""

    moved: Int[Array, "W"]  # token at each place of the moved ones; T for none
    visit: Int[Array, "T"]  # block of each token; any for padding
    place: Int[Array, "T"]  # in the block


def visits_of(chunks: Chunks, slots: int) -> tuple[Visits, Places, Int[Array, ""]]:
    """Return the blocks, the places of tokens, and the number of blocks.

    Args:
        slots: Number of slots, which stands for none.
    """
    width = len(chunks.chunk) + SUBLANES * len(chunks.sizes)
    found = cut(chunks, BLOCK, SUBLANES, width)
    row = found.row
    number = found.counts.sum()
    # There is one visit at least, since Pallas does not define the result of an empty grid: without
    # tokens it copies a slot to itself.
    is_idle = number == 0
    write = jnp.minimum(chunks.write[row], slots - 1)
    empty = (chunks.read[row] >= slots) & ~is_idle
    visits = Visits(
        read=jnp.where(empty | is_idle, write, chunks.read[row]),
        write=write,
        first=found.behind == 0,
        empty=empty,
        begin=found.starts[row] + found.behind // SUBLANES,
        size=jnp.clip(chunks.sizes[row] - found.behind, 0, BLOCK),
    )
    visit = found.first[chunks.chunk] + found.place // BLOCK
    places = Places(
        moved=found.moved,
        visit=jnp.where(found.inside, visit, 0),
        place=jnp.where(found.inside, found.place % BLOCK, 0),
    )
    as_int32 = jax.tree.map(lambda x: x.astype(jnp.int32), (visits, places))
    return *as_int32, jnp.maximum(number, 1).astype(jnp.int32)


@jax.enable_x64(False)
def prefill(
    heads: Heads, memory: Float[Array, "s k r d v"], chunks: Chunks, limit: int
) -> tuple[Float[Array, "T k r v"], Float[Array, "s k r d v"]]:
    """Advance rows that all run over their tokens; see `api.GatedDelta.prefill`.

    Args:
        limit: Bytes of vector memory that the compiler may take.
    """
    slots, k, r, d, v = memory.shape
    visits, places, number = visits_of(chunks, slots)

    def of_tokens(*sizes: int) -> pl.BlockSpec:
        """Return the blocks of an array [k, sizes[:-2], W, sizes[-1]]."""

        def begin(head: Any, visit: Any, *visits: Any) -> tuple[Any, ...]:
            token = pl.multiple_of(Visits(*visits).begin[visit] * SUBLANES, SUBLANES)
            return (head, *(0,) * (len(sizes) - 2), token, 0)

        return pl.BlockSpec(tuple(pl.Element(size) for size in (1, *sizes)), begin)

    def of_state(which: str) -> pl.BlockSpec:
        def slot(head: Any, visit: Any, *visits: Any) -> tuple[Any, ...]:
            return (getattr(Visits(*visits), which)[visit], head, 0, 0, 0)

        return pl.BlockSpec((1, 1, r, d, v), slot)

    out, memory = pl.pallas_call(
        _advance,
        out_shape=(
            jax.ShapeDtypeStruct((len(visits.read), k, r, BLOCK, v), jnp.float32),
            pltpu.HBM(memory.shape, memory.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(k, number),
            in_specs=[
                of_tokens(BLOCK, d),
                of_tokens(BLOCK, d),
                of_tokens(r, BLOCK, v),
                of_tokens(BLOCK, 2 * r),
                of_state("read"),
            ],
            out_specs=(
                pl.BlockSpec((1, 1, r, BLOCK, v), lambda head, visit, *_: (visit, head, 0, 0, 0)),
                of_state("write"),
            ),
        ),
        input_output_aliases={len(visits) + 4: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=limit
        ),
        name="gated_delta_prefill",
    )(*visits, *_moved(heads, places), memory)
    # Blocks that were not visited hold anything, and belong to no token.
    answers = out[places.visit, :, :, places.place]
    return jnp.where(chunks.live[:, None, None, None], answers, 0), memory


def _moved(heads: Heads, places: Places) -> tuple[jax.Array, ...]:
    """Return queries and keys [k, W, d], values [k, r, W, v] and rates [k, W, 2 r] in their places.

    Rates are logarithms of decays, and then strengths of writing.
    """

    def move(x: Float[Array, "T *n"]) -> Float[Array, "W *n"]:
        padded = jnp.pad(x, ((0, 1), *((0, 0),) * (x.ndim - 1)))[places.moved]
        # A block reads behind the last row.
        return jnp.pad(padded, ((0, BLOCK), *((0, 0),) * (x.ndim - 1)))

    own = jax.tree.map(move, heads)
    rates = jnp.concatenate([own.decay, own.writing], axis=-1)
    query, key, rates = (x.transpose(1, 0, 2) for x in (own.query, own.key, rates))
    return query, key, own.value.transpose(1, 2, 0, 3), rates


def _advance(
    read: Any,
    write: Any,
    first: Any,
    empty: Any,
    begin: Any,
    size: Any,
    query: Any,
    key: Any,
    value: Any,
    rates: Any,
    before: Any,
    out: Any,
    after: Any,
) -> None:
    """Advance one key head's states over a block of C tokens.

    query and key [1, C, d], value [1, r, C, v], rates [1, C, 2 r] are logarithms of decays and then
    strengths of writing, out [1, 1, r, C, v], states [1, 1, r, d, v]. Behind the block's tokens are
    those of other rows.
    """
    del read, write, begin
    visit = pl.program_id(1)

    @pl.when(first[visit] == 1)
    def _() -> None:
        after[...] = jnp.where(empty[visit] == 1, 0, before[...])

    row = lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 0)
    column = lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 1)
    inside = row[:, :1] < size[visit]
    queries = jnp.where(inside, query[0], 0)
    keys = jnp.where(inside, key[0], 0)
    own = jnp.where(inside, rates[0], 0)
    known_keys = _dot_transposed(keys, keys)
    scores = _dot_transposed(queries, keys)
    turned = keys.T
    r = value.shape[1]
    totals = _dot(jnp.where(row >= column, 1.0, 0.0), own[:, :r])  # logarithms of products
    for nth in range(r):
        memory = after[0, 0, nth]
        total = totals[:, nth : nth + 1]
        writing = own[:, r + nth : r + nth + 1]
        last = total[BLOCK - 1 :]
        wide = jnp.broadcast_to(total, (BLOCK, BLOCK))
        # Above the diagonal the difference is positive, and its exponential could overflow.
        between = jnp.exp(jnp.where(row >= column, wide - wide.T, -jnp.inf))
        upto = jnp.exp(total)
        inverse = _inverse(known_keys * between * writing, row, column)
        wrong = jnp.where(inside, value[0, nth], 0) - _dot(keys, memory) * upto
        change = _dot(inverse, wrong * writing)
        out[0, 0, nth] = _dot(queries, memory) * upto + _dot(scores * between, change)
        after[0, 0, nth] = memory * jnp.exp(last) + _dot(turned, change * jnp.exp(last - total))


def _inverse(
    x: Float[Array, "C C"], row: Int[Array, "C C"], column: Int[Array, "C C"]
) -> Float[Array, "C C"]:
    """Invert a unit lower triangular matrix; see `chunked.inverse`."""
    inverse = jnp.where(row == column, 1.0, 0.0)
    for log in range((BLOCK - 1).bit_length()):
        block = row >> log
        beside = ((block & 1) == 1) & (block == (column >> log) + 1)
        below = jnp.where(beside, x, 0)
        if log:
            below = _dot(inverse, _dot(below, inverse))
        inverse -= below
    return inverse


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.dot(x, y, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _dot_transposed(x: Float[Array, "C d"], y: Float[Array, "C d"]) -> Float[Array, "C C"]:
    return lax.dot_general(
        x,
        y,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
