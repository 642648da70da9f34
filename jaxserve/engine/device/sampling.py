"""Sampling on the device: from logits to one token per row, for all rows at once.

The stages, in order:

1. `apply_constraints`: allowed tokens, logit bias, no end token before min_tokens.
2. `apply_penalties`: repetition, presence and frequency penalties.
3. `choose_tokens` (token_choice.py): temperature, min_p, top_k and top_p, then a draw.
4. `close_thoughts` (thoughts.py): tokens that end a thought whose budget is used up.
5. `log_probabilities` (logprobs.py), of the logits as the model gave them.

Optional work sits under lax.cond and runs only if some row asks for it.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxserve.engine.device.lane_index import add, put, take
from jaxserve.engine.device.logprobs import log_probabilities, no_log_probabilities
from jaxserve.engine.device.packed import Packed
from jaxserve.engine.device.thoughts import close_thoughts, closes_after
from jaxserve.engine.device.token_choice import choose_tokens
from jaxserve.engine.row_fields import ROW_FIELDS, RowSampling

# Small fields of a row as the device keeps them, F numbers in all: one array costs one gather.
SMALL_FIELDS = Packed(
    tuple((name, declared.shape, declared.dtype) for name, declared in ROW_FIELDS.items())
)

# Declared where no jax is imported; on the device its values are arrays.
jax.tree_util.register_dataclass(RowSampling)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LargeRowFields:
    """The large fields that constraints and penalties read, for R rows in each of A lanes.

    A row that does not use a field has there what its last sequence left behind.
    """

    counts: Int[Array, "A R V"]  # bit 0: in the prompt; other bits: occurrences in the output
    bias_ids: Int[Array, "A R 1024"]  # padded with V
    bias_values: Float[Array, "A R 1024"]
    mask: UInt32[Array, "A R S V/32"]  # allowed tokens, for each slot that a verification samples


def unpack_sampling(packed: Int[Array, "*rows F"]) -> RowSampling[jax.Array]:
    """Unpack the small fields of rows."""
    return RowSampling(**SMALL_FIELDS.unpack(packed))


def take_rows(field: jax.Array, *index: Int[Array, "A r"]) -> jax.Array:
    """Return entries of a field [A, R, ...] by row, lane for lane, as [A*r, ...].

    A row id out of range is padding and gives an arbitrary row.

    Args:
        index: Row of each entry; behind it the index of any further axis.
    """
    taken = take(field, *index)
    return taken.reshape(-1, *taken.shape[2:])


def disable_idle_rows(
    params: RowSampling[jax.Array], idle: Bool[Array, "B"]
) -> RowSampling[jax.Array]:
    """Reset the parameters of rows that do not sample to ones that ask for no optional work.

    Otherwise padding and half-read prompts would make the whole step run it.
    """

    def where(field: jax.Array, value: float) -> jax.Array:
        return jnp.where(idle, jnp.asarray(value, field.dtype), field)

    reset = {
        name: where(getattr(params, name), declared.idle)
        for name, declared in ROW_FIELDS.items()
        if declared.idle is not None
    }
    return replace(params, **reset)


class Sampled(NamedTuple):
    """Sampled tokens of B rows; log-probabilities are zeros if no row asks for any."""

    tokens: Int[Array, "B"]
    finite: Bool[Array, "B"]  # False where a logit is NaN or infinite: the token is worthless
    logprob: Float[Array, "B"]
    top_ids: Int[Array, "B 20"]
    top_logprobs: Float[Array, "B 20"]


def sample(
    logits: Float[Array, "B V"],
    params: RowSampling[jax.Array],
    fields: LargeRowFields,
    rows: Int[Array, "A r"],
    position: Int[Array, "B"],
    drafted: Int[Array, "B k"] | None = None,
) -> Sampled:
    """Sample one token for each of B = A*r entries.

    Args:
        rows: Row of `fields` that each entry uses.
        position: Position that the new token of each entry takes.
        drafted: Tokens between those that `fields` count and the new one, padded with V; None
            where there never are any.
    """
    vocab = logits.shape[-1]
    slot = jnp.zeros_like(position) if drafted is None else (drafted < vocab).sum(-1)

    def process_and_choose(logits: jax.Array) -> jax.Array:
        constrained = apply_constraints(logits, params, fields, rows, slot, position)
        processed = apply_penalties(constrained, params, fields, rows, drafted)
        return choose_tokens(processed, params, position)

    # A branch that hands its logits on copies them, so greedy rows alone have a branch without any.
    tokens = lax.cond(
        jnp.any(_is_processed(params, position)),
        process_and_choose,
        lambda logits: jnp.argmax(logits, axis=-1),
        logits,
    )
    closes_at = params.closes_at
    if drafted is not None:
        index = jnp.arange(drafted.shape[-1])[None]
        first = (position - slot)[:, None]
        closes_at = closes_after(params, drafted, first + index, index < slot[:, None])
    tokens = close_thoughts(tokens, params.closing, closes_at, position)
    logprob, top_ids, top_logprobs = lax.cond(
        jnp.any(params.logprobs >= 0), log_probabilities, no_log_probabilities, logits, tokens
    )
    # For a large V this compiles faster than isfinite(logits).all(-1).
    finite = jnp.isfinite(jnp.abs(logits).max(-1))
    return Sampled(tokens, finite, logprob, top_ids, top_logprobs)


def apply_constraints(
    logits: Float[Array, "B V"],
    params: RowSampling[jax.Array],
    fields: LargeRowFields,
    rows: Int[Array, "A r"],
    slot: Int[Array, "B"],
    position: Int[Array, "B"],
) -> Float[Array, "B V"]:
    """Apply allowed tokens and logit bias, and rule out end tokens before min_tokens.

    Args:
        slot: Number of drafted tokens before the new one, which selects its mask.
    """
    vocab = logits.shape[-1]
    early = _is_early(params, position)

    def apply(logits: jax.Array) -> jax.Array:
        token = jnp.arange(vocab)
        masks = take_rows(fields.mask, rows, slot.reshape(rows.shape))
        words = jnp.repeat(masks, 32, axis=-1)[:, :vocab]
        allowed = (words >> (token & 31).astype(jnp.uint32)[None]) & 1
        logits = jnp.where((params.masked[:, None] == 0) | (allowed == 1), logits, -jnp.inf)
        bias_ids = jnp.where(params.biased[:, None] == 1, take_rows(fields.bias_ids, rows), vocab)
        logits = add(logits, take_rows(fields.bias_values, rows), bias_ids)
        ends = jnp.where(early[:, None], params.end_ids, vocab)
        return put(logits, jnp.full(ends.shape, -jnp.inf, logits.dtype), ends)

    asked = _is_constrained(params, position)
    return lax.cond(jnp.any(asked), apply, lambda logits: logits, logits)


def _is_constrained(params: RowSampling[jax.Array], position: Int[Array, "B"]) -> Bool[Array, "B"]:
    """Return which rows ask for allowed tokens, a bias, or no end token yet."""
    return (params.masked == 1) | (params.biased == 1) | _is_early(params, position)


def _is_early(params: RowSampling[jax.Array], position: Int[Array, "B"]) -> Bool[Array, "B"]:
    """Return which rows may not end yet."""
    return position < params.end_after


def _is_processed(params: RowSampling[jax.Array], position: Int[Array, "B"]) -> Bool[Array, "B"]:
    """Return which rows ask for more than the most probable token of their logits."""
    drawn = params.temperature > 0
    return _is_constrained(params, position) | (params.penalised == 1) | drawn


def apply_penalties(
    logits: Float[Array, "B V"],
    params: RowSampling[jax.Array],
    fields: LargeRowFields,
    rows: Int[Array, "A r"],
    drafted: Int[Array, "B k"] | None,
) -> Float[Array, "B V"]:
    """Apply repetition, presence and frequency penalties to the rows that ask for them.

    Repetition as Keskar et al. 2019 (CTRL) define it, presence and frequency as OpenAI does.
    """

    def apply(logits: jax.Array) -> jax.Array:
        counts = take_rows(fields.counts, rows)
        if drafted is not None:
            # 2: one more occurrence in the output, see LargeRowFields.counts.
            counts = add(counts, jnp.full_like(drafted, 2), drafted)
        produced = (counts >> 1).astype(jnp.float32)
        repetition = params.repetition_penalty[:, None]
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        result = jnp.where(counts > 0, repeated, logits)
        result -= params.presence_penalty[:, None] * jnp.minimum(produced, 1)
        result -= params.frequency_penalty[:, None] * produced
        return jnp.where(params.penalised[:, None] == 1, result, logits)

    return lax.cond(jnp.any(params.penalised == 1), apply, lambda logits: logits, logits)
