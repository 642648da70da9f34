"""Recurrent states on a mesh: the only caller of the kernels that advance them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxserve.models.layer_kind import ConvState, LayerState
from jaxserve.pallas_kernels.gated_delta import chunked
from jaxserve.pallas_kernels.gated_delta.api import AXES as DELTA_AXES
from jaxserve.pallas_kernels.gated_delta.api import (
    Advanced,
    DeltaStates,
    GatedDelta,
    Options,
    Tokens,
)
from jaxserve.pallas_kernels.short_convolution import reference as short_convolution
from jaxserve.pallas_kernels.short_convolution.api import AXES as CONV_AXES
from jaxserve.pallas_kernels.short_convolution.api import Chunks, Convolved, ConvStates
from jaxserve.sharding.mesh import device_kind
from jaxserve.sharding.rules import DP_AXES, partition

NO_BORDER: Final = 2**30  # position behind every token
LayerStates = DeltaStates | ConvStates  # of one layer, one in each slot
Inputs = Tokens | jax.Array  # of a layer for each token, [T, k, ...]


def axes_of(states: LayerStates) -> LayerStates:
    """Return the letters of each array of a layer's states."""
    return CONV_AXES if isinstance(states, ConvStates) else DELTA_AXES


def states_of(state: LayerState, slots: int) -> LayerStates:
    """Return the abstract states of a layer on one device that holds all of its heads."""
    axes = CONV_AXES if isinstance(state, ConvState) else DELTA_AXES
    sizes = state.sizes() | {"s": slots, "t": state.taps - 1}

    def abstract(letters: str) -> jax.ShapeDtypeStruct:
        shape = tuple(sizes[letter] for letter in letters)
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return jax.tree.map(abstract, axes)


class StateRows(NamedTuple):
    """Rows of a step whose states are advanced, with the slots that their tables name.

    A table's entry is the state that a page's tokens end with, or as many of them as there are. The
    model adds a leading axis A of lanes to every field.
    """

    table: Int[Array, "R W"]  # slots
    begin: Int[Array, "R"]  # position of the chunk's first token
    starts: Int[Array, "R"]  # as in Chunks
    sizes: Int[Array, "R"]  # as in Chunks
    chunk: Int[Array, "T"]  # as in Chunks
    live: Bool[Array, "T"]  # as in Chunks

    def part(self, done: Int[Array, "R"], sizes: Int[Array, "R"]) -> "StateRows":
        """Return the rows with `sizes` of their tokens, those behind the first `done`."""
        starts = self.starts + done
        place = jnp.arange(len(self.chunk)) - starts[self.chunk]
        live = self.live & (place >= 0) & (place < sizes[self.chunk])
        return self._replace(begin=self.begin + done, starts=starts, sizes=sizes, live=live)

    def up_to_a_kept_state(
        self, done: Int[Array, "R"], counts: Int[Array, "R"], page_size: int
    ) -> Int[Array, "R"]:
        """Return how many tokens come next, behind the first `done`, of the first `counts`.

        They end with the page behind which the next entry names another slot, or with the last.
        """
        begin = self.begin + done
        end = self.begin + counts
        index = jnp.arange(self.table.shape[1] - 1)[None]
        passed = (index >= begin[:, None] // page_size) & (index < (end[:, None] - 1) // page_size)
        kept = passed & (self.table[:, :-1] != self.table[:, 1:])
        border = jnp.where(kept, (index + 1) * page_size, end[:, None])
        # A table of one entry has no border within.
        return jnp.minimum(jnp.min(border, axis=1, initial=NO_BORDER), end) - begin

    def chunks(self, page_size: int, slots: int) -> Chunks:
        """Return the chunks that read the state before the first token and leave that behind all.

        Args:
            slots: Number of slots, which stands for none.
        """
        end = self.begin + self.sizes
        first = jnp.minimum(self.starts, len(self.live) - 1)
        runs = (self.sizes > 0) & self.live[first]
        read = jnp.where(self.begin > 0, self._slot_behind(self.begin, page_size), slots)
        write = jnp.where(runs, self._slot_behind(end, page_size), slots)
        return Chunks(self.starts, self.sizes, self.chunk, self.live, read, write)

    def _slot_behind(self, tokens: Int[Array, "R"], page_size: int) -> Int[Array, "R"]:
        entry = jnp.maximum(tokens - 1, 0) // page_size
        return jnp.take_along_axis(self.table, entry[:, None], axis=1)[:, 0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Recurrence:
    """The layers with a state of a step: called with a layer's tokens and its states.

    All fields except `rows` are fixed in a compiled step.
    """

    rows: StateRows  # of all lanes
    page_size: int = field(metadata={"static": True})  # tokens of a table's entry
    mesh: Mesh = field(metadata={"static": True})
    # What advances rows of one token and of many, unless drafted tokens are verified.
    gated_delta: GatedDelta = field(metadata={"static": True})
    # Most tokens that one row has in the step; None when that is not bounded.
    max_row_tokens: int | None = field(metadata={"static": True})
    # How many of a row's tokens count is only known behind the step: states stay as they are.
    verifies: bool = field(default=False, metadata={"static": True})

    def __call__(
        self, tokens: Inputs, taps: Float[Array, "t k f"], states: LayerStates
    ) -> tuple[Float[Array, "T k *n"], "LayerStates | Unsettled"]:
        """Return the outputs of the tokens, float32, and the states behind the tokens.

        T counts the tokens of all lanes, lane after lane; arrays of states have a leading axis A.
        """
        heads = PartitionSpec(DP_AXES, "tensor")
        out, advanced = self._by_lane(self._one_lane, states, (heads, self._split(states)))(
            tokens, taps, states, self.rows
        )
        return out, Unsettled(self, tokens, taps, states) if self.verifies else advanced

    def settle(
        self,
        tokens: Inputs,
        taps: Float[Array, "t k f"],
        states: LayerStates,
        counts: Int[Array, "A R"],
    ) -> LayerStates:
        """Return the states behind the first `counts` tokens of each row."""
        return self._by_lane(self._settle_one_lane, states, self._split(states))(
            tokens, taps, states, (self.rows, counts)
        )

    def _split(self, states: LayerStates) -> LayerStates:
        return state_partition(states, self.mesh)

    def _by_lane(self, function: Callable, states: LayerStates, out: Any) -> Callable:
        """Run a function of tokens, taps, states and fields of rows on each lane's and shard's."""
        heads = PartitionSpec(DP_AXES, "tensor")
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(
                heads,
                PartitionSpec(None, "tensor"),
                self._split(states),
                PartitionSpec(DP_AXES),
            ),
            out_specs=out,
            check_vma=False,
        )

    def _one_lane(
        self, tokens: Inputs, taps: jax.Array, states: LayerStates, rows: StateRows
    ) -> tuple[jax.Array, LayerStates]:
        """Advance the states of one lane and one shard's heads, inside shard_map.

        The leading axis A has length 1 here.
        """
        states, rows = jax.tree.map(lambda x: x[0], (states, rows))
        if self.verifies or self.max_row_tokens == 1:
            out, states = self._advance(tokens, taps, states, rows)
        else:
            like = jax.eval_shape(self._advance, tokens, taps, states, rows).out
            buffer = _room_for(like, tokens)
            out, states = self._in_turns(tokens, taps, states, rows, rows.sizes, buffer)
            out = jnp.where(_along(rows.live, out), out, 0)
        return out, jax.tree.map(lambda x: x[None], states)

    def _settle_one_lane(
        self,
        tokens: Inputs,
        taps: jax.Array,
        states: LayerStates,
        row_fields: tuple[StateRows, jax.Array],
    ) -> LayerStates:
        """Advance the states over the tokens that count."""
        states, (rows, counts) = jax.tree.map(lambda x: x[0], (states, row_fields))
        # A row that only pads a step may count fewer tokens than none.
        _, states = self._in_turns(tokens, taps, states, rows, jnp.maximum(counts, 0), None)
        return jax.tree.map(lambda x: x[None], states)

    def _in_turns(
        self,
        tokens: Inputs,
        taps: jax.Array,
        states: LayerStates,
        rows: StateRows,
        counts: Int[Array, "R"],
        out: Any,
    ) -> tuple[Any, LayerStates]:
        """Advance the states over each row's first `counts` tokens, in turns.

        A turn ends where a state is to be kept, which stays in its page's entry, as if each token
        had come in a step of its own. There is one turn at least: the times of steps are measured
        without rows.

        Args:
            out: Array [T, k, ...] into which the outputs of rows' tokens are written; None where
                they are not wanted.
        """

        def is_left(carry: tuple[jax.Array, jax.Array, Any, LayerStates]) -> jax.Array:
            number, done, _, _ = carry
            return (number == 0) | (done < counts).any()

        def turn(
            carry: tuple[jax.Array, jax.Array, Any, LayerStates],
        ) -> tuple[jax.Array, jax.Array, Any, LayerStates]:
            number, done, out, states = carry
            sizes = rows.up_to_a_kept_state(done, counts, self.page_size)
            part = rows.part(done, sizes)
            advanced = self._advance(tokens, taps, states, part)
            if out is not None:
                out = jnp.where(_along(part.live, out), advanced.out, out)
            return number + 1, done + sizes, out, advanced.states

        first = (jnp.int32(0), jnp.zeros_like(counts), out, states)
        _, _, out, states = lax.while_loop(is_left, turn, first)
        return out, states

    def _advance(
        self, tokens: Inputs, taps: jax.Array, states: LayerStates, rows: StateRows
    ) -> Advanced | Convolved:
        chunks = rows.chunks(self.page_size, len(states.inputs))
        if isinstance(states, ConvStates):
            assert isinstance(tokens, jax.Array)
            return short_convolution.advance(tokens, taps, states, chunks, self.max_row_tokens)
        assert isinstance(tokens, Tokens)
        kernel = self.gated_delta
        options = Options(device_kind(self.mesh))
        if self.max_row_tokens == 1 and not self.verifies:
            return kernel.decode(tokens, taps, states, chunks, options)
        return chunked.advance(tokens, taps, states, chunks, self.max_row_tokens, kernel, options)


def _room_for(out: jax.ShapeDtypeStruct, tokens: Inputs) -> jax.Array:
    """Return an array like the outputs, with numbers of the layer's inputs in it.

    Zeros depend on nothing: for a GPU, XLA made those of all layers when a step began.
    """
    inputs = tokens.inputs if isinstance(tokens, Tokens) else tokens
    count = math.prod(out.shape[2:])
    return inputs[..., -count:].reshape(out.shape).astype(out.dtype)


def _along(mask: Bool[Array, "T"], x: Float[Array, "T *n"]) -> Bool[Array, "T *m"]:
    return mask.reshape(-1, *(1,) * (x.ndim - 1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unsettled:
    """States of one layer before a step's tokens, with what it takes to advance them.

    A drafted token that turned out wrong cannot be taken out of a state again.
    """

    recurrence: Recurrence
    tokens: Inputs
    taps: Float[Array, "t k f"]
    states: LayerStates

    def settle(self, counts: Int[Array, "A R"]) -> LayerStates:
        """Return the states behind the first `counts` tokens of each row."""
        return self.recurrence.settle(self.tokens, self.taps, self.states, counts)


def state_partition(states: LayerStates, mesh: Mesh) -> LayerStates:
    """Return the PartitionSpec of each array of a layer's states, which have a leading axis A."""
    return jax.tree.map(
        lambda x, letters: partition("A" + letters, x.shape, mesh), states, axes_of(states)
    )
