"""Drafters: what proposes tokens on the device, in the step that verifies them.

A drafted token is sampled as the model's own would be: with the row's parameters and penalties, and
the noise of its position. So it is what the model takes there wherever the drafter's distribution
says the same.
"""

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxserve.engine.device.sampling import sample, silence, take_rows
from jaxserve.engine.device.sharded_model import by_lane
from jaxserve.engine.device.state import State
from jaxserve.engine.device.token_layout import Place, locate, take
from jaxserve.engine.plan import DRAFTED

Drafting = tuple[
    Any, jax.Array, jax.Array
]  # what is kept, newest tokens [A, R], drafted ones so far [A, R, k]


class Computed(NamedTuple):
    """What a step of the model computed, for a drafter that reads its hidden states."""

    ids: Int[Array, "A R"]  # row of each chunk, out of range for padding
    tokens: Int[Array, "A T"]
    hidden: Float[Array, "A T D"]  # before the final norm
    place: Place
    samples: Bool[Array, "A R"]  # whether a token was sampled for the row
    newest: Int[Array, "A R"]  # the packed token after which the row's newest one was


class Drafter(Protocol):
    """A small model, or a head on the model's hidden states. In a step, `params["drafter"]` are its
    parameters.

    params, abstract: its parameters on the mesh, and their abstract values. kept: abstract value of
    `State.drafter`.
    """

    @property
    def params(self) -> Any: ...

    @property
    def abstract(self) -> Any: ...

    @property
    def kept(self) -> Any: ...

    def next(
        self,
        params: dict,
        state: State,
        ids: Int[Array, "A R"],
        tokens: Int[Array, "A R"],
        place: Place,
    ) -> tuple[Any, Float[Array, "B V"]]:
        """What it keeps after one more token of each row, and the logits of the token after; V may
        be its own.

        B = A * R. Of tokens that are not live nothing is to be kept.
        """
        ...

    def read(self, params: dict, state: State, computed: Computed) -> Any:
        """What it keeps after a step of the model. state: with rows as they were before it."""
        ...

    def catch_up(
        self,
        params: dict,
        state: State,
        ids: Int[Array, "A R"],
        tokens: Int[Array, "A T"],
        place: Place,
    ) -> tuple[Any, Float[Array, "A T D"]]:
        """What it keeps after chunks of known tokens, and its hidden states. Only asked of drafters
        with pages, which a proposer says to have (engine.speculation).
        """
        ...


def draft_tokens(
    drafter: Drafter,
    mesh: Mesh,
    params: dict,
    state: State,
    batch: dict[str, jax.Array],
    most: int,
    vocab: int,
) -> tuple[State, Int[Array, "A R k"]]:
    """`most` tokens for every row that has more than one sample, one after the other; those beyond
    are nobody's.

    The last one is computed as well: if all prove right, the drafter lacks none. batch: of a verify
    step, whose rows have room for as many positions as samples. vocab: V of the model.
    """
    rows, ids = state.rows, batch["rows"]
    present = (batch["sizes"] > 0).astype(jnp.int32)
    samples = batch["samples"] * present
    begin = take(rows.length, ids)
    sampling = jax.tree.map(lambda field: take_rows(field, ids), rows.sampling)
    sampling = replace(sampling, logprobs=jnp.full_like(sampling.logprobs, -1))

    def compute(kept: Any, tokens: jax.Array, turn: jax.Array) -> tuple[Any, jax.Array]:
        place = locate(
            begin + jnp.minimum(turn, jnp.maximum(samples - 1, 0)), present, tokens.shape[-1]
        )
        place = place._replace(
            live=place.live & (samples > 1) & (turn < samples)
        )  # token t is row t's
        return drafter.next(params, replace(state, drafter=kept), ids, tokens, place)

    def draft(carry: Drafting, turn: jax.Array) -> tuple[Drafting, None]:
        kept, tokens, drafted = carry
        kept, values = compute(kept, tokens, turn)
        asked = silence(sampling, (turn + 1 >= samples).reshape(-1))
        position, before = (begin + turn + 1).reshape(-1), drafted.reshape(-1, most)
        found = by_lane(mesh, sample)(
            _fitted(values, vocab), asked, rows.fields, ids, position, before
        )
        tokens = found.tokens.reshape(ids.shape)
        return (kept, tokens, drafted.at[..., turn].set(tokens)), None

    nothing = jnp.full((*ids.shape, most), vocab, jnp.int32)
    begun = (state.drafter, take(rows.token, ids), nothing)
    (kept, tokens, drafted), _ = lax.scan(draft, begun, jnp.arange(most))
    kept, _ = compute(kept, tokens, jnp.int32(most))
    return replace(state, drafter=kept), drafted


def filled(
    tokens: Int[Array, "A T"], drafted: Int[Array, "A R k"], place: Place
) -> Int[Array, "A T"]:
    """The tokens of a verify step with those in place that the device drafted: behind the first of
    their chunk.
    """
    nth = jnp.arange(tokens.shape[-1])[None] - take(place.starts, place.chunk) - 1
    chunks = take(drafted, place.chunk)
    own = jnp.take_along_axis(chunks, jnp.clip(nth, 0, drafted.shape[-1] - 1)[..., None], axis=-1)[
        ..., 0
    ]
    return jnp.where(tokens == DRAFTED, own, tokens)


def _fitted(values: Float[Array, "B v"], vocab: int) -> Float[Array, "B V"]:
    """Logits over the model's vocabulary: tables are padded differently, and what a drafter lacks
    it never drafts.
    """
    missing = max(vocab - values.shape[-1], 0)
    return jnp.pad(values[:, :vocab], ((0, 0), (0, missing)), constant_values=-jnp.inf)
