"""Decode steps of the gated delta rule on NVIDIA's Hopper, in Pallas (Mosaic GPU).

A thread block has one key head of one row: it convolves the head's inputs, and then fetches the
head's memory in tiles of columns, which do not depend on each other, ahead of their use. A tile is
advanced in registers and copied back to its slot, or to another one. Each state is read and written
once, in place.
"""

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.pallas_kernels.gated_delta import gpu_prefill
from jaxserve.pallas_kernels.gated_delta.api import (
    EPS,
    Advanced,
    DeltaStates,
    Demand,
    Heads,
    Options,
    Tokens,
)
from jaxserve.pallas_kernels.hopper import ALIGNMENT, HOPPER, SHARED_BYTES, tiled
from jaxserve.pallas_kernels.short_convolution.api import Chunks

COLUMNS: Final = 64  # of a tile of a memory
STAGES: Final = 3  # tiles of a thread block in shared memory
FLOAT32: Final = 4  # bytes
THREADS: Final = 128  # of a warpgroup
KEY: Final = 128  # numbers of a key: a tile of more does not fit into registers


def check(options: Options, demand: Demand) -> None:
    """Raise KernelError for chips and sizes that the kernel cannot take."""
    instead = "--recurrence reference"
    if options.device_kind.startswith("NVIDIA") and not HOPPER.match(options.device_kind):
        raise KernelError(
            f"the GPU kernel is written for Hopper (H100, H200); this is {options.device_kind} "
            f"({instead})"
        )
    if demand.d != KEY or demand.v % THREADS:
        raise KernelError(
            f"states of {demand.d} x {demand.v} numbers: the GPU kernel supports {KEY} x multiples "
            f"of {THREADS} ({instead})"
        )
    tiles = STAGES * demand.d * COLUMNS
    shared = FLOAT32 * (tiles + 2 * demand.d + 2 * demand.r * demand.v)
    if shared > SHARED_BYTES - 2 * ALIGNMENT:
        raise KernelError(
            f"{demand.r} value heads of {demand.v} numbers take {shared} of {SHARED_BYTES} bytes "
            f"of shared memory ({instead})"
        )


class Inputs(NamedTuple):
    """Operands in global memory; the states are updated in place."""

    inputs: Any  # [R, k, f]
    rates: Any  # [R, k, 2 r]: factors of decay, then strengths of writing
    taps: Any  # [t, k, f]
    read: Any  # [R] slots
    write: Any  # [R] slots
    empty: Any  # [R], 1 where the state before is empty
    kept: Any  # [s, t-1, k, f], as DeltaStates.inputs
    memory: Any  # [s, k, r, d, v]


class Shared(NamedTuple):
    """Buffers and barriers in shared memory."""

    mixed: Any  # [f]: the head's convolved query, key and values
    out: Any  # [r v]
    tiles: Any  # [stages, d, columns]
    full: Any  # [stages], barriers: the copy into a tile has landed


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
    rates = jnp.concatenate([jnp.exp(tokens.decay), tokens.writing], axis=-1)
    empty = chunks.read >= slots
    read = jnp.where(empty, chunks.write, chunks.read)
    pools = jax.tree.map(jax.new_ref, states)

    def gated_delta(*refs: Any) -> None:
        Body(Inputs(*refs[:8]), refs[8], Shared(*refs[9:])).run()

    out = plgpu.kernel(
        gated_delta,  # the name that profiles show
        out_type=jax.ShapeDtypeStruct((rows, k, r * v), jnp.float32),
        scratch_types=[
            plgpu.SMEM((f,), jnp.float32),
            plgpu.SMEM((r * v,), jnp.float32),
            tiled((STAGES, d, COLUMNS), jnp.dtype(jnp.float32)),
            plgpu.Barrier(num_barriers=STAGES),
        ],
        grid=(rows, k),
        grid_names=("row", "head"),
    )(
        tokens.inputs,
        rates,
        taps,
        *(x.astype(jnp.int32) for x in (read, chunks.write, empty)),
        *pools,
    )
    after = DeltaStates(*(jax.freeze(pool) for pool in pools))
    return Advanced(out.reshape(rows, k, r, v), after)


def prefill(
    heads: Heads, memory: Float[Array, "s k r d v"], chunks: Chunks, options: Options
) -> tuple[Float[Array, "T k r v"], Float[Array, "s k r d v"]]:
    """Advance rows over their tokens; see `api.GatedDelta.prefill`."""
    return gpu_prefill.prefill(heads, memory, chunks)


class Body(NamedTuple):
    """Work of one thread block: one key head of one row."""

    inputs: Inputs
    out: Any  # [R, k, r v] in global memory
    shared: Shared

    def run(self) -> None:
        """Advance the head's state; a row that does not run has an answer of zeros."""
        row = lax.axis_index("row")
        head = lax.axis_index("head")
        slots = self.inputs.memory.shape[0]
        runs = self.inputs.write[row] < slots

        @pl.when(runs)
        def _() -> None:
            self._advance(row, head)

        @pl.when(jnp.logical_not(runs))
        def _() -> None:
            for begin in range(0, self.out.shape[2], THREADS):
                self.out[row, head, pl.ds(begin, THREADS)] = jnp.zeros(THREADS, jnp.float32)

    def _advance(self, row: Any, head: Any) -> None:
        inputs = self.inputs
        shared = self.shared
        memory = inputs.memory
        read = inputs.read[row]
        write = inputs.write[row]
        is_empty = inputs.empty[row] == 1
        _, _, r, d, v = memory.shape
        places = [(nth, begin) for nth in range(r) for begin in range(0, v, COLUMNS)]

        def fetch(nth: int) -> None:
            if nth < len(places):
                value_head, begin = places[nth]
                plgpu.copy_gmem_to_smem(
                    memory.at[read, head, value_head, :, pl.ds(begin, COLUMNS)],
                    shared.tiles.at[nth % STAGES],
                    shared.full.at[nth % STAGES],
                )

        for nth in range(STAGES):
            fetch(nth)
        self._convolve(row, head)
        query, key = self._query_and_key(d)
        for nth, (value_head, begin) in enumerate(places):
            stage = nth % STAGES
            plgpu.barrier_wait(shared.full.at[stage])
            decay = inputs.rates[row, head, value_head]
            writing = inputs.rates[row, head, r + value_head]
            tile = shared.tiles.at[stage]
            old = plgpu.load(tile, layout=plgpu.Layout.WGMMA)
            old = _unless(is_empty, old) * decay
            value = _vector(shared.mixed, 2 * d + value_head * v + begin, COLUMNS, 0)
            known = jnp.sum(old * key, axis=0)
            change = (value - known) * writing
            new = old + key * lax.broadcast_in_dim(change, old.shape, [1])
            tile[...] = new
            shared.out[pl.ds(value_head * v + begin, COLUMNS)] = jnp.sum(new * query, axis=0)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                tile, memory.at[write, head, value_head, :, pl.ds(begin, COLUMNS)]
            )
            if nth >= 1 and nth - 1 + STAGES < len(places):
                # The tile before has left its buffer, unlike this one.
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                fetch(nth - 1 + STAGES)
        plgpu.copy_smem_to_gmem(shared.out, self.out.at[row, head])
        plgpu.wait_smem_to_gmem(0)

    def _convolve(self, row: Any, head: Any) -> None:
        """Convolve the head's inputs into shared memory, and keep the newest in the slot."""
        inputs = self.inputs
        kept = inputs.kept
        read = inputs.read[row]
        write = inputs.write[row]
        is_empty = inputs.empty[row] == 1
        count = kept.shape[1]
        new = inputs.inputs[row, head].astype(jnp.float32)
        past = [_unless(is_empty, kept[read, lag, head]) for lag in range(count)]
        total = new * inputs.taps[count, head].astype(jnp.float32)
        for lag in reversed(range(count)):
            total += past[lag] * inputs.taps[lag, head].astype(jnp.float32)
        for lag, x in enumerate([*past[1:], new]):
            kept[write, lag, head] = x
        mixed = total / (1 + jnp.exp(-total))
        self.shared.mixed[...] = mixed.astype(inputs.inputs.dtype).astype(jnp.float32)
        plgpu.commit_smem()

    def _query_and_key(self, d: int) -> tuple[jax.Array, jax.Array]:
        """Return the query and the key, of length 1, for each column of a tile; [d, columns]."""
        mixed = self.shared.mixed
        found = []
        for begin, factor in ((0, d**-0.5), (d, 1.0)):
            x = mixed[pl.ds(begin, d)]
            scale = lax.rsqrt(jnp.sum(x * x) + EPS) * factor
            column = _vector(mixed, begin, d, 1) * scale
            found.append(lax.broadcast_in_dim(column, (d, COLUMNS), [0]))
        return found[0], found[1]


def _unless(is_empty: jax.Array, x: jax.Array) -> jax.Array:
    """Return x, or zeros where the state before is empty: its slot may hold NaN."""
    return jnp.where(jnp.broadcast_to(is_empty, x.shape), jnp.zeros_like(x), x)


def _vector(mixed: Any, begin: int, size: int, axis: int) -> jax.Array:
    """Load numbers as a tile has them in registers that lacks the axis."""
    return plgpu.load(mixed.at[pl.ds(begin, size)], layout=plgpu.Layout.WGMMA.reduce(axis))
