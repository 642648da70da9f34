"""The contract of layers with a recurrent state: what they keep of a sequence, and of a step.

A layer with the gated delta rule (Yang et al. 2024) keeps a matrix for each value head. Of every
token it takes a query, a key, a value, a decay and a writing strength. The matrix is multiplied by
the decay; what it answers to the key is compared with the value; the difference, times the writing
strength, is added along the key; and the answer to the query is the result. Queries, keys and
values come out of a short_convolution, whose newest inputs the layer keeps as well.

An implementation is a module with the functions of `GatedDelta`: rows of one token, whose cost is
that of reading and writing the states, and rows of several tokens, behind their convolution.
`chunked.py` takes a step apart into both, and has XLA's form of the latter. States are float32, and
so is everything that is computed from the convolution on.

The functions work on one data-parallel rank (a lane), one layer and one shard's heads, inside
shard_map.

Letters:
  T  tokens of the step, padding included      R  rows
  k  key heads of the shard                    r  value heads of a key head
  d  numbers of a query or a key               v  numbers of a value
  f  2 d + r v numbers that are convolved      t  taps of the convolution
  s  slots
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from jaxtyping import Array, Float

from jaxserve.pallas_kernels.short_convolution.api import Chunks

# Added to the squared length of a query or a key before its root, as in flash-linear-attention.
EPS: Final = 1e-6


class DeltaStates(NamedTuple):
    """States of one layer, one in each slot: float32 arrays, or stand-ins for arrays."""

    # Inputs of the convolution, those of the newest t - 1 tokens, the newest last: [s, t-1, k, f].
    inputs: Any
    memory: Any  # [s, k, r, d, v]


# Letters of the arrays' dimensions, as of the sharding rules.
AXES = DeltaStates("stkf", "skrdv")


class Tokens(NamedTuple):
    """Inputs of the rule, for every token. Padding may hold anything, NaN included."""

    inputs: Float[Array, "T k f"]  # of the convolution: query, key and values of each key head
    decay: Float[Array, "T k r"]  # natural logarithm of the factor, float32
    writing: Float[Array, "T k r"]  # float32


class Heads(NamedTuple):
    """Queries, keys and values of tokens, with what else the rule takes; float32.

    Queries and keys have length 1, but for queries' factor 1 / sqrt(d).
    """

    query: Float[Array, "*T k d"]
    key: Float[Array, "*T k d"]
    value: Float[Array, "*T k r v"]
    decay: Float[Array, "*T k r"]
    writing: Float[Array, "*T k r"]


class Advanced(NamedTuple):
    """Answers to the queries, and the states behind the step."""

    out: Float[Array, "T k r v"]  # float32; 0 for tokens that are not live
    states: DeltaStates


class Demand(NamedTuple):
    """Sizes of a shard's states that decide whether an implementation can advance them."""

    k: int
    r: int
    d: int
    v: int
    t: int


@dataclass(frozen=True)
class Options:
    """Parameters that are fixed when a step is compiled."""

    device_kind: str = ""  # vendor's name of the chip that runs the step


class GatedDelta(Protocol):
    """Functions that the module of an implementation has."""

    @staticmethod
    def check(options: Options, demand: Demand) -> None:
        """Raise KernelError when the implementation cannot advance such states.

        The message names the offending number, its limit and what changes it.
        """
        ...

    @staticmethod
    def decode(
        tokens: Tokens,
        taps: Float[Array, "t k f"],
        states: DeltaStates,
        chunks: Chunks,
        options: Options,
    ) -> Advanced:
        """Advance the states over a step in which each row has one token: row r has token r.

        States that are donated are updated in place.
        """
        ...

    @staticmethod
    def prefill(
        heads: Heads, memory: Float[Array, "s k r d v"], chunks: Chunks, options: Options
    ) -> tuple[Float[Array, "T k r v"], Float[Array, "s k r d v"]]:
        """Advance the matrices of rows over their tokens, and return the answers to these.

        A row with tokens has a slot to write. What `heads` have of tokens of no row are zeros, and
        so are the answers to them. Memory that is donated is updated in place.
        """
        ...
