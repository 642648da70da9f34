"""Decode steps of the gated delta rule on TPUs, in Pallas: each state is read and written once.

The grid goes over blocks of key heads and, for each of them, over the rows. Pallas's pipeline
brings a row's part of its state, found by the slot, while the row before is computed; the convolved
inputs, the rule and the answer to the query stay in registers. The pools of states are updated in
place.
"""

from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.pallas_kernels.gated_delta import tpu_prefill
from jaxserve.pallas_kernels.gated_delta.api import (
    EPS,
    Advanced,
    DeltaStates,
    Demand,
    Heads,
    Options,
    Tokens,
)
from jaxserve.pallas_kernels.grouped_matmul.tpu_plan import (
    LEAST_MEMORY,
    MIB,
    SPARED,
    SUBLANES,
    TILE_LANES,
    VECTOR_MEMORY,
)
from jaxserve.pallas_kernels.short_convolution.api import Chunks

FLOAT32: Final = 4  # bytes


def check(options: Options, demand: Demand) -> None:
    """Raise KernelError for sizes that the kernel cannot take."""
    instead = "--recurrence reference"
    if demand.d % TILE_LANES or demand.v % TILE_LANES:
        raise KernelError(
            f"states of {demand.d} x {demand.v} numbers: the TPU kernel supports multiples of "
            f"{TILE_LANES} ({instead})"
        )
    memory = _vector_memory(options)
    heads = _heads_of_a_block(demand.k)
    used = max(_bytes_of_a_block(demand), _bytes_of_a_prompt(demand))
    if used > memory - memory // SPARED:
        raise KernelError(
            f"states of {heads} key heads with {demand.r} value heads each take {used} bytes: they "
            f"do not fit into {memory} bytes of vector memory (--tensor may make them fewer, or "
            f"{instead})"
        )


def _vector_memory(options: Options) -> int:
    return VECTOR_MEMORY.get(options.device_kind, LEAST_MEMORY) * MIB


def _limit(options: Options) -> int:
    """Return the bytes of vector memory that the compiler may take."""
    memory = _vector_memory(options)
    return memory - memory // (2 * SPARED)


def _heads_of_a_block(k: int) -> int:
    """Return the key heads of a block: 8 where k is a multiple of 8, otherwise all k."""
    return SUBLANES if k % SUBLANES == 0 else k


def _bytes_of_a_block(demand: Demand) -> int:
    """Return the vector memory of what a visit reads and writes, two buffers of each."""
    k, r, d, v, t = demand
    heads = _heads_of_a_block(k)
    sublanes = -(-heads // SUBLANES) * SUBLANES
    convolved = 2 * d + r * v
    memories = 2 * heads * r * d * v
    kept = 2 * (t - 1) * sublanes * convolved
    # Inputs and taps, as if they were float32; rates, in a tile of lanes; answers.
    small = sublanes * ((1 + t) * convolved + TILE_LANES + r * v)
    return 2 * (memories + kept + small) * FLOAT32


def _bytes_of_a_prompt(demand: Demand) -> int:
    """Return the vector memory of a block of tokens of one key head, two buffers of each array."""
    _, r, d, v, _ = demand
    tokens = tpu_prefill.BLOCK
    memories = 2 * r * d * v
    inputs = tokens * (2 * d + r * v + TILE_LANES)
    return 2 * (memories + inputs + tokens * r * v) * FLOAT32


class Visits(NamedTuple):
    """Slots that the kernel reads and writes for each row.

    A row that does not run repeats the running row before it, or the first one, and changes
    nothing: consecutive visits of one slot share its buffer.
    """

    read: Int[Array, "R"]
    write: Int[Array, "R"]
    runs: Int[Array, "R"]  # 1 for a row that runs
    empty: Int[Array, "R"]  # 1 for a row whose state before is empty


def visits_of(chunks: Chunks, slots: int) -> Visits:
    """Return the visits of a step in which row r has token r.

    Args:
        slots: Number of slots, which stands for none.
    """
    runs = chunks.write < slots
    place = jnp.arange(len(runs))
    before = lax.cummax(jnp.where(runs, place, -1))
    row = jnp.where(before >= 0, before, jnp.argmax(runs))
    write = jnp.minimum(chunks.write[row], slots - 1)
    empty = (chunks.read >= slots)[row]
    # Where no row runs, the first visit's slot is copied to itself.
    read = jnp.where(empty | ~runs[row], write, chunks.read[row])
    return Visits(*(x.astype(jnp.int32) for x in (read, write, runs, empty)))


@jax.enable_x64(False)
def decode(
    tokens: Tokens,
    taps: Float[Array, "t k f"],
    states: DeltaStates,
    chunks: Chunks,
    options: Options,
) -> Advanced:
    """Advance the state of each row over its one token; see `api.GatedDelta.decode`."""
    rows, k, f = tokens.inputs.shape
    slots, _, r, d, v = states.memory.shape
    kept = len(taps) - 1  # inputs that a slot has
    heads = _heads_of_a_block(k)
    rates = jnp.concatenate([jnp.exp(tokens.decay), tokens.writing], axis=-1)

    def of_row(*sizes: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, heads, *sizes), lambda head, row, *_: (row, head, *_zeros(sizes)))

    def of_state(which: str) -> DeltaStates:
        """Return the blocks of the states that a visit reads or writes."""

        def slot(row: Any, visits: tuple[Any, ...]) -> Any:
            return getattr(Visits(*visits), which)[row]

        return DeltaStates(
            pl.BlockSpec(
                (1, kept, heads, f), lambda head, row, *visits: (slot(row, visits), 0, head, 0)
            ),
            pl.BlockSpec(
                (1, heads, r, d, v), lambda head, row, *visits: (slot(row, visits), head, 0, 0, 0)
            ),
        )

    visits = visits_of(chunks, slots)
    before = len(visits) + 3  # arguments before the states
    out, *after = pl.pallas_call(
        partial(_advance, tokens.inputs.dtype),
        out_shape=(
            jax.ShapeDtypeStruct((rows, k, r * v), jnp.float32),
            *(pltpu.HBM(x.shape, x.dtype) for x in states),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(k // heads, rows),
            in_specs=[
                of_row(f),
                of_row(2 * r),
                pl.BlockSpec((kept + 1, heads, f), lambda head, row, *_: (0, head, 0)),
                *of_state("read"),
            ],
            out_specs=[of_row(r * v), *of_state("write")],
        ),
        input_output_aliases={before: 1, before + 1: 2},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=_limit(options),
        ),
        name="gated_delta",
    )(*visits, tokens.inputs, rates, taps, *states)
    return Advanced(out.reshape(rows, k, r, v), DeltaStates(*after))


def prefill(
    heads: Heads, memory: Float[Array, "s k r d v"], chunks: Chunks, options: Options
) -> tuple[Float[Array, "T k r v"], Float[Array, "s k r d v"]]:
    """Advance rows over their tokens; see `api.GatedDelta.prefill`."""
    return tpu_prefill.prefill(heads, memory, chunks, _limit(options))


def _zeros(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (0,) * len(sizes)


def _advance(
    dtype: jnp.dtype,
    read: Any,
    write: Any,
    runs: Any,
    empty: Any,
    inputs: Any,
    rates: Any,
    taps: Any,
    inputs_before: Any,
    memory_before: Any,
    out: Any,
    inputs_after: Any,
    memory_after: Any,
) -> None:
    """Advance one row's states of a block of heads.

    inputs [1, k, f], rates [1, k, 2 r] are factors of decay and then strengths of writing, taps
    [t, k, f], out [1, k, r v], blocks of states as those of DeltaStates for one slot.
    """
    del read, write
    row = pl.program_id(1)

    @pl.when(runs[row] == 1)
    def _() -> None:
        is_empty = empty[row] == 1
        new = inputs[0].astype(jnp.float32)
        past = jnp.where(is_empty, 0, inputs_before[0])
        for place, x in enumerate([*past[1:], new]):
            inputs_after[0, place] = x
        mixed = _convolved(new, past, taps[...]).astype(dtype).astype(jnp.float32)
        heads, r, d, v = memory_before.shape[1:]
        for head in range(heads):
            own = mixed[head : head + 1]
            query = _turned(_unit(own[:, :d]) * d**-0.5, v)
            key = _turned(_unit(own[:, d : 2 * d]), v)
            for nth in range(r):
                decay, writing = (rates[0, head : head + 1, at : at + 1] for at in (nth, r + nth))
                memory = jnp.where(is_empty, 0, memory_before[0, head, nth]) * decay
                begin = 2 * d + nth * v
                known = jnp.sum(memory * key, axis=0, keepdims=True)
                memory += key * ((own[:, begin : begin + v] - known) * writing)
                memory_after[0, head, nth] = memory
                answer = jnp.sum(memory * query, axis=0, keepdims=True)
                out[0, head : head + 1, nth * v : (nth + 1) * v] = answer

    @pl.when(runs[row] == 0)
    def _() -> None:
        out[...] = jnp.zeros_like(out)

        # The output buffer is written back to the slot, even if no row fills it.
        @pl.when(row == 0)
        def _() -> None:
            inputs_after[...] = inputs_before[...]
            memory_after[...] = memory_before[...]


def _convolved(
    new: Float[Array, "k f"], past: Float[Array, "t-1 k f"], taps: Float[Array, "t k f"]
) -> Float[Array, "k f"]:
    factors = taps.astype(jnp.float32)
    total = new * factors[-1]
    for lag in range(1, len(factors)):
        total += past[-lag] * factors[-1 - lag]
    return jax.nn.silu(total)


def _unit(x: Float[Array, "1 d"]) -> Float[Array, "1 d"]:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPS)


def _turned(x: Float[Array, "1 d"], v: int) -> Float[Array, "d v"]:
    """Return v columns that all are x."""
    return jnp.broadcast_to(x, (v, x.shape[1])).T
