"""The gated delta rule in plain XLA, block by block of a row's tokens.

Within a block of 64 tokens the changes of the memory depend on each other through a triangular
system, as in the chunk-wise form of the delta rule (Yang et al. 2024), whose matrix is inverted for
all tokens together. A turn of a loop takes one block of one row, from the row's slot and back to
it. Rows of one token, which are most of what a busy engine has, are advanced as in a decode step,
and rows of a few tokens each are computed side by side.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.pallas_kernels.gated_delta import reference
from jaxserve.pallas_kernels.gated_delta.api import (
    Advanced,
    DeltaStates,
    Demand,
    GatedDelta,
    Heads,
    Options,
    Tokens,
)
from jaxserve.pallas_kernels.gated_delta.reference import advance_by, heads_of
from jaxserve.pallas_kernels.short_convolution.api import Chunks
from jaxserve.pallas_kernels.short_convolution.reference import (
    before_chunks,
    kept,
    newest_inputs,
)

BLOCK: Final = 64  # tokens of a block
decode = reference.decode


def check(options: Options, demand: Demand) -> None:
    """Take states of all sizes, on every device."""


def advance(
    tokens: Tokens,
    taps: Float[Array, "t k f"],
    states: DeltaStates,
    chunks: Chunks,
    max_row_tokens: int | None,
    kernel: GatedDelta,
    options: Options,
) -> Advanced:
    """Advance the states of a step's rows over their tokens; see reference.advance.

    Args:
        kernel: What advances rows of one token and rows of many; rows of a few are advanced here.
    """
    if max_row_tokens is not None and max_row_tokens <= BLOCK:
        together = partial(_advance_together, most=max_row_tokens)
        return advance_by(together, tokens, taps, states, chunks, max_row_tokens)
    first = jnp.minimum(chunks.starts, len(tokens.inputs) - 1)
    singles, longer = _apart(chunks, first, len(states.inputs))
    own = jax.tree.map(lambda x: x[first], tokens)
    done = kernel.decode(own, taps, states, singles, options)
    prefill = partial(kernel.prefill, options=options)
    others = _advance_longer(prefill, tokens, taps, done.states, longer)
    place = jnp.where(singles.live, first, len(others.out))
    return Advanced(others.out.at[place].set(done.out, mode="drop"), others.states)


def _apart(chunks: Chunks, first: Int[Array, "R"], slots: int) -> tuple[Chunks, Chunks]:
    """Return the rows of one token as chunks of a decode step, and the others.

    Args:
        first: First token of each row.
        slots: Number of slots, which stands for none.
    """
    rows = jnp.arange(len(first))
    is_single = (chunks.sizes == 1) & (chunks.write < slots)
    singles = Chunks(
        starts=rows,
        sizes=jnp.ones_like(rows),
        chunk=rows,
        live=is_single,
        read=chunks.read,
        write=jnp.where(is_single, chunks.write, slots),
    )
    is_longer = ~is_single & (chunks.write < slots)
    longer = chunks._replace(
        sizes=jnp.where(is_longer, chunks.sizes, 0),
        live=chunks.live & is_longer[chunks.chunk],
        write=jnp.where(is_longer, chunks.write, slots),
    )
    return singles, longer


def _advance_longer(
    prefill: Callable[[Heads, Array, Chunks], tuple[Array, Array]],
    tokens: Tokens,
    taps: Float[Array, "t k f"],
    states: DeltaStates,
    chunks: Chunks,
) -> Advanced:
    """Advance the states of rows of several tokens, in place."""
    before = before_chunks(states.inputs, chunks)
    heads = heads_of(tokens, taps, before, chunks, d=states.memory.shape[-2])
    # Padding may hold NaN, which a product with 0 would not remove.
    heads = jax.tree.map(lambda x: _masked(x, chunks.live), heads)
    out, memory = prefill(heads, states.memory, chunks)
    newest = newest_inputs(tokens.inputs, before, chunks)
    return Advanced(out, DeltaStates(kept(states.inputs, newest, chunks), memory))


def _advance_together(
    heads: Heads, memory: Float[Array, "R k r d v"], chunks: Chunks, most: int
) -> tuple[Float[Array, "T k r v"], Float[Array, "R k r d v"]]:
    """Advance all rows side by side, over at most `most` tokens each."""
    count = len(heads.value)
    place = jnp.arange(most)[None]
    index = jnp.minimum(chunks.starts[:, None] + place, count - 1)  # [R, C]
    live = (place < chunks.sizes[:, None]) & chunks.live[index]
    of_rows = jax.tree.map(lambda x: jax.vmap(_masked)(x[index], live), heads)
    answers, memory = jax.vmap(_block)(of_rows, memory)
    out = jnp.zeros_like(heads.value)
    return out.at[jnp.where(live, index, count)].set(answers, mode="drop"), memory


def _masked(x: Float[Array, "T *n"], live: Array) -> Float[Array, "T *n"]:
    return jnp.where(live.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)


def prefill(
    heads: Heads, memory: Float[Array, "s k r d v"], chunks: Chunks, options: Options
) -> tuple[Float[Array, "T k r v"], Float[Array, "s k r d v"]]:
    """Advance rows over their tokens, a block in a turn; see `api.GatedDelta.prefill`."""
    slots = len(memory)
    counts = -(-chunks.sizes // BLOCK)
    ends = jnp.cumsum(counts)
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, BLOCK), *((0, 0),) * (x.ndim - 1))), heads)
    out = jnp.zeros_like(padded.value)

    def turn(block: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, memory = carry
        row = jnp.searchsorted(ends, block, side="right", method="compare_all")
        behind = (block - (ends[row] - counts[row])) * BLOCK
        begin = chunks.starts[row] + behind
        own = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, begin, BLOCK), padded)
        live = jnp.arange(BLOCK) < chunks.sizes[row] - behind
        own = jax.tree.map(lambda x: _masked(x, live), own)
        write = chunks.write[row]
        slot = jnp.where(behind > 0, write, chunks.read[row])
        before = lax.dynamic_index_in_dim(memory, jnp.minimum(slot, slots - 1), keepdims=False)
        answers, new = _block(own, jnp.where(slot < slots, before, 0))
        old = lax.dynamic_slice_in_dim(out, begin, BLOCK)
        answers = jnp.where(live[:, None, None, None], answers, old)
        out = lax.dynamic_update_slice_in_dim(out, answers, begin, 0)
        return out, lax.dynamic_update_index_in_dim(memory, new, write, 0)

    out, memory = lax.fori_loop(0, ends[-1], turn, (out, memory))
    return out[:-BLOCK], memory


def _block(
    heads: Heads, memory: Float[Array, "k r d v"]
) -> tuple[Float[Array, "C k r v"], Float[Array, "k r d v"]]:
    """Advance one memory over the C tokens of a block, of which those that are 0 change nothing.

    With S the memory before the block and D_i the product of the decays up to token i, the change
    that token i adds along its key is c_i = w_i (v_i - D_i S' k_i - sum over j < i of
    (D_i / D_j) (k_i k_j) c_j), a triangular system.
    """
    query = heads.query.transpose(1, 0, 2)  # [k, C, d]
    key = heads.key.transpose(1, 0, 2)
    value = heads.value.transpose(1, 2, 0, 3)  # [k, r, C, v]
    writing = heads.writing.transpose(1, 2, 0)[..., None]  # [k, r, C, 1]
    total = jnp.cumsum(heads.decay.transpose(1, 2, 0), axis=-1)  # logarithm of D, [k, r, C]
    upto = jnp.exp(total)[..., None]
    lower = jnp.tril(jnp.ones((total.shape[-1],) * 2, bool))[None, None]
    # Above the diagonal the difference is positive, and its exponential could overflow.
    between = jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf))
    keys = _product("kid,kjd->kij", key, key)[:, None] * between
    scores = _product("kid,kjd->kij", query, key)[:, None] * between
    # One for each value head: for products of all value heads of a key head together, XLA would
    # turn over the whole pool of states.
    query, key = (_for_each(x, value.shape[1]) for x in (query, key))
    known = _product("krid,krdv->kriv", key, memory) * upto
    change = _product("krij,krjv->kriv", inverse(keys * writing), writing * (value - known))
    answers = _product("krid,krdv->kriv", query, memory) * upto
    answers += _product("krij,krjv->kriv", scores, change)
    to_end = jnp.exp(total[..., -1:] - total)[..., None]
    added = _product("krjd,krjv->krdv", key, change * to_end)
    return answers.transpose(2, 0, 1, 3), memory * upto[:, :, -1:] + added


def inverse(x: Float[Array, "k r C C"]) -> Float[Array, "k r C C"]:
    """Invert unit lower triangular matrices; only what lies below their diagonals is read.

    Where A and B are the inverses of two neighbouring blocks on the diagonal, and X lies below the
    first, the inverse of both together has -B X A there. That is done for blocks of one number, of
    two, and so on. The product of I - X, I + X^2, I + X^4 and so on takes as many operations, but
    its terms are large and cancel where keys repeat. XLA's solver of triangular systems cannot be
    part of a CUDA graph, and is a loop over the tokens on a TPU.
    """
    size = x.shape[-1]
    index = jnp.arange(size)
    found = jnp.broadcast_to(jnp.eye(size, dtype=x.dtype), x.shape)
    for log in range((size - 1).bit_length()):
        block = index >> log
        is_odd = (block % 2 == 1)[:, None]
        beside = is_odd & (block[:, None] == block[None] + 1)
        below = jnp.where(beside, x, 0)
        if log:
            below = _product("krij,krjl->kril", below, found)
            below = _product("krij,krjl->kril", found, below)
        found -= below
    return found


def _for_each(x: Float[Array, "k *n"], r: int) -> Float[Array, "k r *n"]:
    return jnp.broadcast_to(x[:, None], (len(x), r, *x.shape[1:]))


def _product(subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(subscripts, x, y, precision=lax.Precision.HIGHEST)
