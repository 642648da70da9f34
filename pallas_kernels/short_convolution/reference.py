"""Short convolutions in plain XLA: what runs in every step."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.pallas_kernels.short_convolution.api import Chunks, Convolved, ConvStates


def advance(
    inputs: Float[Array, "T k f"],
    taps: Float[Array, "t k f"],
    states: ConvStates,
    chunks: Chunks,
    max_row_tokens: int | None,
) -> Convolved:
    """Convolve a step's inputs, of which padding may hold anything, NaN included.

    Args:
        max_row_tokens: Most tokens of a row, which makes no difference here.
    """
    before = before_chunks(states, chunks)
    out = convolve(inputs, taps, before.inputs, chunks)
    after = ConvStates(newest_inputs(inputs, before.inputs, chunks))
    return Convolved(jnp.where(chunks.live[:, None, None], out, 0), kept(states, after, chunks))


def before_chunks[States](states: States, chunks: Chunks) -> States:
    """Return the states that the rows go on from; that of a new row is empty."""
    return jax.tree.map(lambda x: x.at[chunks.read].get(mode="fill", fill_value=0), states)


def kept[States](states: States, after: States, chunks: Chunks) -> States:
    """Return the slots with the states behind the rows' chunks."""
    return jax.tree.map(lambda old, new: old.at[chunks.write].set(new, mode="drop"), states, after)


def convolve(
    inputs: Float[Array, "T k f"],
    taps: Float[Array, "t k f"],
    before: Float[Array, "R t-1 k f"],
    chunks: Chunks,
) -> Float[Array, "T k f"]:
    """Convolve each number of each head over the tokens of a row; float32."""
    count = before.shape[1]
    index = jnp.arange(len(inputs))
    place = index - chunks.starts[chunks.chunk]  # of each token in its chunk
    wide = inputs.astype(jnp.float32)
    factors = taps.astype(jnp.float32)[:, None]
    total = wide * factors[count]
    for lag in range(1, count + 1):
        in_chunk = wide[jnp.maximum(index - lag, 0)]
        in_state = before[chunks.chunk, jnp.clip(count + place - lag, 0, count - 1)]
        earlier = jnp.where((place >= lag)[:, None, None], in_chunk, in_state)
        total += earlier * factors[count - lag]
    return total


def newest_inputs(
    inputs: Float[Array, "T k f"], before: Float[Array, "R t-1 k f"], chunks: Chunks
) -> Float[Array, "R t-1 k f"]:
    """Return the inputs of the newest tokens of every row."""
    count = before.shape[1]
    begin = chunks.starts[:, None]
    place = chunks.sizes[:, None] - count + jnp.arange(count)[None]  # in the row's chunk
    in_chunk = inputs[jnp.clip(begin + place, 0, len(inputs) - 1)]
    in_state = jnp.take_along_axis(
        before, jnp.clip(count + place, 0, count - 1)[:, :, None, None], axis=1
    )
    return jnp.where((place >= 0)[:, :, None, None], in_chunk.astype(before.dtype), in_state)
