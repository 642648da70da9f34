"""Start-up check of the kernel for recurrent states, on the device that serves."""

from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine.device.kernels.agreement import require_agreement
from jaxserve.pallas_kernels.gated_delta import chunked
from jaxserve.pallas_kernels.gated_delta.api import (
    DeltaStates,
    Demand,
    GatedDelta,
    Heads,
    Options,
    Tokens,
)
from jaxserve.pallas_kernels.short_convolution.api import Chunks

# What rows do with their states, over and over: idle ones are the first, the last and two together.
RUN: Final = ("idle", "begin", "move", "idle", "idle", "stay", "idle")
# Tokens of rows in the step of prompts: in part of a block, in whole ones, and in several.
LENGTHS: Final = (3, 0, 130, 256, 20)
LENGTHS_ON_CPU: Final = (3, 0, 20, 5)
REPEATED: Final = 4
REPEATED_ON_CPU: Final = 1  # kernels run in slow interpreters there
# Of the taps: convolved numbers of about 1, which 16 bits round less than larger ones.
SCALE: Final = 0.3
# Relative to the root mean square of the result, by dtype of activations. Convolved numbers are
# rounded to it: where two exponentials differ in their last bit, one may be rounded otherwise.
BOUNDS: Final = {jnp.dtype(jnp.bfloat16): 0.02, jnp.dtype(jnp.float32): 1e-3}


Compared = list[tuple[str, np.ndarray]]  # arrays of a step, with their names


@jax.enable_x64(False)
def check_recurrence(
    kernel: GatedDelta, demands: Iterable[tuple[Options, Demand]], dtype: jnp.dtype, device: Any
) -> None:
    """Raise EngineError when the kernel and the reference advance states differently.

    Args:
        dtype: Dtype of activations.
    """
    on_cpu = device.platform == "cpu"
    repeated = REPEATED_ON_CPU if on_cpu else REPEATED
    lengths = LENGTHS_ON_CPU if on_cpu else LENGTHS

    def compare(ours: Compared, theirs: Compared, bound: float) -> None:
        for name, found in ours:
            subject = f"the kernel of recurrent states, in {name} of {list(found.shape)},"
            difference = _difference(found, dict(theirs)[name])
            unit = " of their root mean square"
            require_agreement(subject, difference, bound, "--recurrence", device, unit)

    with jax.default_device(device):
        for options, demand in demands:
            step = (options, demand, dtype, repeated)
            compare(_decode(kernel, *step), _decode(chunked, *step), BOUNDS[dtype])
            prompts = (options, demand, lengths)
            exact = BOUNDS[jnp.dtype(jnp.float32)]
            compare(_prefill(kernel, *prompts), _prefill(chunked, *prompts), exact)


def _difference(found: np.ndarray, right: np.ndarray) -> float:
    """Return the largest difference, infinite where one array alone has a NaN."""
    if (np.isnan(found) != np.isnan(right)).any():
        return np.inf
    scale = np.sqrt(np.nanmean(np.square(right))) or 1.0  # rows that are idle answer zeros
    return float(np.nanmax(np.abs(found - right)) / scale)


def _decode(
    kernel: GatedDelta, options: Options, demand: Demand, dtype: jnp.dtype, repeated: int
) -> Compared:
    """Run a decode step, and one in which no row runs; return answers and all slots of each.

    Slots that no row reads hold NaN.
    """
    rng = np.random.default_rng(0)
    k, r, d, v, t = demand
    f = 2 * d + r * v
    kinds = np.array(RUN * repeated)
    rows = len(kinds)
    slots = 2 * rows
    own = np.arange(rows)
    read = np.where(kinds == "begin", slots, own)
    write = np.select([kinds == "idle", kinds == "move"], [slots, rows + own], own)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    states = DeltaStates(normal(slots, t - 1, k, f), normal(slots, k, r, d, v))
    for pool in states:
        pool[np.setdiff1d(np.arange(slots), read[kinds != "idle"])] = np.nan
    tokens = Tokens(
        jnp.asarray(normal(rows, k, f), dtype),
        jnp.asarray(-rng.uniform(0, 1, (rows, k, r)), jnp.float32),
        jnp.asarray(rng.uniform(0, 1, (rows, k, r)), jnp.float32),
    )
    taps = jnp.asarray(SCALE * normal(t, k, f), dtype)
    decode = jax.jit(partial(kernel.decode, options=options), donate_argnums=2)
    first = decode(tokens, taps, jax.tree.map(jnp.asarray, states), _chunks(read, write, slots))
    found = _named("", first.out, *first.states)  # before the states are donated
    nothing = np.full(rows, slots)
    second = decode(tokens, taps, first.states, _chunks(own, nothing, slots))
    return found + _named(" without rows", second.out, *second.states)


def _named(step: str, out: jax.Array, inputs: jax.Array, memory: jax.Array) -> Compared:
    arrays = (("answers", out), ("kept inputs", inputs), ("states", memory))
    return [(f"{name}{step}", np.array(x)) for name, x in arrays]


def _prefill(
    kernel: GatedDelta, options: Options, demand: Demand, lengths: tuple[int, ...]
) -> Compared:
    """Run a step of prompts; return the answers and all slots.

    The last row begins with an empty state, and the third writes another slot than it reads. Slots
    that no row reads hold NaN.
    """
    rng = np.random.default_rng(0)
    k, r, d, v, _ = demand
    rows = len(lengths)
    own = np.arange(rows)
    slots = 2 * rows
    sizes = np.array(lengths)
    total = sizes.sum()
    read = np.where(own == rows - 1, slots, own)
    write = np.where(own == 2, rows, own)
    write = np.where(sizes == 0, slots, write)
    memory = rng.standard_normal((slots, k, r, d, v), np.float32)
    memory[np.setdiff1d(np.arange(slots), read[sizes > 0])] = np.nan

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.square(x).sum(-1, keepdims=True))

    def array(x: np.ndarray) -> jax.Array:
        return jnp.asarray(x, jnp.float32)

    def numbers(x: np.ndarray) -> jax.Array:
        return jnp.asarray(x, jnp.int32)

    heads = Heads(
        array(unit(rng.standard_normal((total, k, d))) / np.sqrt(d)),
        array(unit(rng.standard_normal((total, k, d)))),
        array(rng.standard_normal((total, k, r, v))),
        array(-rng.uniform(0, 1, (total, k, r))),
        array(rng.uniform(0, 1, (total, k, r))),
    )
    chunks = Chunks(
        starts=numbers(np.cumsum(sizes) - sizes),
        sizes=numbers(sizes),
        chunk=numbers(np.repeat(own, sizes)),
        live=jnp.ones(total, bool),
        read=numbers(read),
        write=numbers(write),
    )
    prefill = jax.jit(partial(kernel.prefill, options=options), donate_argnums=1)
    out, after = prefill(heads, array(memory), chunks)
    return [("answers to prompts", np.asarray(out)), ("states behind them", np.asarray(after))]


def _chunks(read: np.ndarray, write: np.ndarray, slots: int) -> Chunks:
    """Return the chunks of a decode step; rows that write no slot do not run."""
    rows = jnp.arange(len(read), dtype=jnp.int32)
    slots_of = (jnp.asarray(x, jnp.int32) for x in (read, write))
    return Chunks(rows, jnp.ones_like(rows), rows, jnp.asarray(write < slots), *slots_of)
