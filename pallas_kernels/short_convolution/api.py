"""The contract of layers that convolve each number over a few tokens, and of their chunks.

A layer's output at a token depends on its inputs at the newest t tokens, so that it keeps the
inputs of t - 1 tokens of a sequence. Such a convolution may be all that a layer does, as in LFM2,
or a part of it (gated_delta).

The functions work on one data-parallel rank (a lane), one layer and one shard's heads, inside
shard_map.

Letters:
  T  tokens of the step, padding included      R  rows
  k  heads of the shard: numbers that devices do not split
  f  numbers of a head                         t  taps of the convolution
  s  slots
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int


class ConvStates(NamedTuple):
    """States of one layer, one in each slot: float32 arrays, or stand-ins for arrays."""

    inputs: Any  # those of the newest t - 1 tokens, the newest last: [s, t-1, k, f]


# Letters of the arrays' dimensions, as of the sharding rules.
AXES = ConvStates("stkf")


class Chunks(NamedTuple):
    """Chunks of a step: tokens of a row, and the slots of the state before and behind them.

    The model adds a leading axis A of lanes to every field. No slot is written by two rows in one
    step, nor read by one row and written by another.
    """

    starts: Int[Array, "R"]  # row r has tokens starts[r] : starts[r] + sizes[r]
    sizes: Int[Array, "R"]  # 0 for padding
    chunk: Int[Array, "T"]  # row of each token; any row for padding
    live: Bool[Array, "T"]  # False for tokens of no row, and for that of a row that had ended
    read: Int[Array, "R"]  # slot of the state before; s, which is out of range, is an empty state
    write: Int[Array, "R"]  # slot of the state behind; s, which is out of range, stores nothing


class Convolved(NamedTuple):
    """Outputs of the convolution, and the states behind the step."""

    out: Float[Array, "T k f"]  # float32; 0 for tokens that are not live
    states: ConvStates
