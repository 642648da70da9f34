"""Drafters: models that propose tokens on the device, in the step that verifies them.

A drafted token is sampled as the model's own would be: with the row's parameters and penalties, and
with the noise of its position. Wherever the drafter's distribution equals the model's, the drafted
token is therefore the one that the model samples there.
"""

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxserve.engine.device.lane_index import take
from jaxserve.engine.device.sampling import disable_idle_rows, sample, take_rows, unpack_sampling
from jaxserve.engine.device.sharded_model import by_lane
from jaxserve.engine.device.state import State
from jaxserve.engine.device.token_layout import TokenLayout
from jaxserve.engine.plan import DRAFTED

# The drafter's state, newest tokens [A, R], and drafted tokens so far [A, R, k].
Drafting = tuple[Any, jax.Array, jax.Array]


class ModelPass(NamedTuple):
    """One pass of the model over a step's tokens, for drafters that read its hidden states."""

    ids: Int[Array, "A R"]  # row of each chunk, out of range for padding
    tokens: Int[Array, "A T"]
    hidden: Float[Array, "A T D"]  # before the final norm
    layout: TokenLayout
    samples: Bool[Array, "A R"]  # True for chunks that a token was sampled for
    newest: Int[Array, "A R"]  # packed token that the row's newest token was sampled behind


class Drafter(Protocol):
    """A small model, or a head on the model's hidden states, that drafts tokens inside a step.

    `State.drafter` is what the drafter keeps between steps; methods return a new one.
    """

    @property
    def params(self) -> Any:
        """Parameters on the mesh, which steps find in `params["drafter"]`."""
        ...

    @property
    def abstract_params(self) -> Any:
        """Shapes, dtypes and shardings of the parameters."""
        ...

    @property
    def abstract_state(self) -> Any:
        """Shapes, dtypes and shardings of `State.drafter`."""
        ...

    def next(
        self,
        params: dict,
        state: State,
        ids: Int[Array, "A R"],
        tokens: Int[Array, "A R"],
        layout: TokenLayout,
    ) -> tuple[Any, Float[Array, "B V"]]:
        """Take one more token of each row; return the new state and the logits of the next token.

        B = A * R, and V may be smaller or larger than the model's. Tokens that are not live leave
        no trace in the state.
        """
        ...

    def observe(self, params: dict, state: State, model: ModelPass) -> Any:
        """Return the drafter's state after a pass of the model.

        Args:
            state: State with rows as they were before the step.
        """
        ...

    def catch_up(
        self,
        params: dict,
        state: State,
        ids: Int[Array, "A R"],
        tokens: Int[Array, "A T"],
        layout: TokenLayout,
    ) -> tuple[Any, Float[Array, "A T D"]]:
        """Take chunks of known tokens; return the new state and the drafter's hidden states.

        Called only for drafters with pages, which their proposer declares (host.speculation).
        """
        ...


def draft_tokens(
    drafter: Drafter,
    mesh: Mesh,
    params: dict,
    state: State,
    batch: dict[str, jax.Array],
    drafts: int,
    vocab: int,
) -> tuple[State, Int[Array, "A R k"]]:
    """Draft `drafts` tokens one after the other for every row that samples more than one.

    Tokens beyond a row's own number of samples are meaningless.

    Args:
        batch: Batch of a verify step, whose rows have room for as many positions as samples.
        vocab: Size V of the model's vocabulary.
    """
    rows = state.rows
    ids = batch["rows"]
    present = (batch["sizes"] > 0).astype(jnp.int32)
    samples = batch["samples"] * present
    begin = take(rows.length, ids)
    sampling = unpack_sampling(take_rows(rows.sampling, ids))
    sampling = replace(sampling, logprobs=jnp.full_like(sampling.logprobs, -1))

    def compute(kept: Any, tokens: jax.Array, turn: jax.Array) -> tuple[Any, jax.Array]:
        # Rows that are done stay at their last position, so that none leaves its pages.
        position = begin + jnp.minimum(turn, jnp.maximum(samples - 1, 0))
        layout = TokenLayout.of_chunks(position, present, tokens.shape[-1])
        # With one token per row, token t is row t's.
        drafting = (samples > 1) & (turn < samples)
        layout = layout._replace(live=layout.live & drafting)
        return drafter.next(params, replace(state, drafter=kept), ids, tokens, layout)

    def draft(carry: Drafting, turn: jax.Array) -> tuple[Drafting, None]:
        kept, tokens, drafted = carry
        kept, values = compute(kept, tokens, turn)
        active = disable_idle_rows(sampling, (turn + 1 >= samples).reshape(-1))
        position = (begin + turn + 1).reshape(-1)
        before = drafted.reshape(-1, drafts)
        values = _fit_vocabulary(values, vocab)
        found = by_lane(mesh, sample)(values, active, rows.fields, ids, position, before)
        tokens = found.tokens.reshape(ids.shape)
        return (kept, tokens, drafted.at[..., turn].set(tokens)), None

    nothing = jnp.full((*ids.shape, drafts), vocab, jnp.int32)
    first = (state.drafter, take(rows.token, ids), nothing)
    (kept, tokens, drafted), _ = lax.scan(draft, first, jnp.arange(drafts))
    # The last drafted token is computed as well: if all are accepted, the drafter lacks none.
    kept, _ = compute(kept, tokens, jnp.int32(drafts))
    return replace(state, drafter=kept), drafted


def fill_in_drafts(
    tokens: Int[Array, "A T"], drafted: Int[Array, "A R k"], layout: TokenLayout
) -> Int[Array, "A T"]:
    """Replace the placeholders among a verify step's tokens by what the device drafted.

    A chunk's drafts come behind its first token.
    """
    draft_index = jnp.arange(tokens.shape[-1])[None] - take(layout.starts, layout.chunk) - 1
    draft_index = jnp.clip(draft_index, 0, drafted.shape[-1] - 1)
    chunk_drafts = take(drafted, layout.chunk)
    own = jnp.take_along_axis(chunk_drafts, draft_index[..., None], axis=-1)[..., 0]
    return jnp.where(tokens == DRAFTED, own, tokens)


def _fit_vocabulary(values: Float[Array, "B v"], vocab: int) -> Float[Array, "B V"]:
    """Cut or pad a drafter's logits to the model's vocabulary.

    Embedding tables are padded differently. Tokens that the drafter lacks are never drafted.
    """
    missing = max(vocab - values.shape[-1], 0)
    return jnp.pad(values[:, :vocab], ((0, 0), (0, missing)), constant_values=-jnp.inf)
