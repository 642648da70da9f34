"""The gated delta rule in plain XLA, token by token: what other forms are compared with."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.pallas_kernels.gated_delta.api import (
    EPS,
    Advanced,
    DeltaStates,
    Heads,
    Options,
    Tokens,
)
from jaxserve.pallas_kernels.short_convolution.api import Chunks
from jaxserve.pallas_kernels.short_convolution.reference import (
    before_chunks,
    convolve,
    kept,
    newest_inputs,
)

# Function from the tokens' heads, the rows' memories and the chunks to answers and new memories.
AdvanceRows = Callable[[Heads, Array, Chunks], tuple[Array, Array]]


def decode(
    tokens: Tokens,
    taps: Float[Array, "t k f"],
    states: DeltaStates,
    chunks: Chunks,
    options: Options,
) -> Advanced:
    """Advance the state of each row over its one token; see `api.GatedDelta.decode`."""
    return advance(tokens, taps, states, chunks, max_row_tokens=1)


def advance(
    tokens: Tokens,
    taps: Float[Array, "t k f"],
    states: DeltaStates,
    chunks: Chunks,
    max_row_tokens: int | None,
) -> Advanced:
    """Advance the states of a step's rows over their tokens.

    Args:
        max_row_tokens: Most tokens of a row, None where that is not bounded. 1 is a decode step, in
            which T = R and token r belongs to row r.
    """
    return advance_by(_one_by_one, tokens, taps, states, chunks, max_row_tokens)


def advance_by(
    advance_rows: AdvanceRows,
    tokens: Tokens,
    taps: Float[Array, "t k f"],
    states: DeltaStates,
    chunks: Chunks,
    max_row_tokens: int | None,
) -> Advanced:
    """Advance the states as `advance` does, where rows may have several tokens by a function."""
    before = before_chunks(states, chunks)
    heads = heads_of(tokens, taps, before.inputs, chunks, d=before.memory.shape[-2])
    if max_row_tokens == 1:
        out, memory = step(heads, before.memory)
    else:
        out, memory = advance_rows(heads, before.memory, chunks)
    after = DeltaStates(newest_inputs(tokens.inputs, before.inputs, chunks), memory)
    out = jnp.where(chunks.live[:, None, None, None], out, 0)
    return Advanced(out, kept(states, after, chunks))


def heads_of(
    tokens: Tokens,
    taps: Float[Array, "t k f"],
    before: Float[Array, "R t-1 k f"],
    chunks: Chunks,
    d: int,
) -> Heads:
    """Convolve the inputs of tokens, with those before each row's, and take them apart."""
    mixed = jax.nn.silu(convolve(tokens.inputs, taps, before, chunks))
    # Rounded to the dtype in which transformers goes on.
    mixed = mixed.astype(tokens.inputs.dtype).astype(jnp.float32)
    value = mixed[..., 2 * d :].reshape(*tokens.decay.shape, -1)
    query = _unit(mixed[..., :d]) * d**-0.5
    return Heads(query, _unit(mixed[..., d : 2 * d]), value, tokens.decay, tokens.writing)


def _unit(x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
    """Scale every vector to length 1."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPS)


def _one_by_one(
    heads: Heads, memory: Float[Array, "R k r d v"], chunks: Chunks
) -> tuple[Float[Array, "T k r v"], Float[Array, "R k r d v"]]:
    """Advance the rows over their tokens, in the order of the tokens."""

    def turn(t: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, memory = carry
        row = chunks.chunk[t]
        answer, new = step(jax.tree.map(lambda x: x[t], heads), memory[row])
        new = jnp.where(chunks.live[t], new, memory[row])
        return out.at[t].set(answer), memory.at[row].set(new)

    nothing = jnp.zeros_like(heads.value)
    return lax.fori_loop(0, len(heads.value), turn, (nothing, memory))


def step(
    heads: Heads, memory: Float[Array, "*T k r d v"]
) -> tuple[Float[Array, "*T k r v"], Float[Array, "*T k r d v"]]:
    """Apply the rule to one token of each memory."""
    memory = memory * jnp.exp(heads.decay)[..., None, None]
    key = heads.key[..., None, :, None]
    known = jnp.sum(memory * key, axis=-2)
    change = (heads.value - known) * heads.writing[..., None]
    memory = memory + key * change[..., None, :]
    return jnp.sum(memory * heads.query[..., None, :, None], axis=-2), memory
