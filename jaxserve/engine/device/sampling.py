"""From logits to tokens, on the device, for all rows at once.

No sort of the vocabulary: thresholds are found by bisection over the 32-bit patterns of the floats,
whose order is the floats' order. Noise depends on (seed, choice, position) alone, never on the
step, the row or the batch. Optional work sits under lax.cond on "any row asks".
"""

from dataclasses import replace
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxserve.request import MAX_LOGPROBS

TOKEN_NOISE = 0  # what the noise is for: the last fold into the key


@flax.struct.dataclass
class RowSampling:
    """Sampling parameters of rows; the scalars of SamplingParams in device form. B counts rows."""

    key: UInt32[Array, "B 2"]  # the seed's high and low half
    choice: Int[Array, "B"]
    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    repetition: Float[Array, "B"]
    presence: Float[Array, "B"]
    frequency: Float[Array, "B"]
    logprobs: Int[Array, "B"]
    end_after: Int[Array, "B"]  # end tokens are out at positions before this
    end_ids: Int[Array, "B E"]  # padded with V
    biased: Int[Array, "B"]
    masked: Int[Array, "B"]
    penalised: Int[Array, "B"]


@flax.struct.dataclass
class RowFields:
    """The large fields that processors read, for every row of every lane (A lanes, R rows of the
    state).
    """

    counts: Int[Array, "A R V"]  # bit 0: in the prompt; the rest: times in the output
    bias_ids: Int[Array, "A R 1024"]  # padded with V
    bias_values: Float[Array, "A R 1024"]
    mask: UInt32[Array, "A R S V/32"]  # for each place that a verification samples


def take_rows(field: jax.Array, rows: Int[Array, "A r"]) -> jax.Array:
    """[A*r, ...]: entries of a field [A, R, ...] by row, lane for lane. Ids out of range give any
    row (padding).
    """
    taken = jax.vmap(lambda lane, ids: lane.at[ids].get(mode="clip"))(field, rows)
    return taken.reshape(-1, *taken.shape[2:])


def _take_masks(
    mask: UInt32[Array, "A R S V/32"], rows: Int[Array, "A r"], slot: Int[Array, "B"]
) -> UInt32[Array, "B V/32"]:
    """As take_rows; of a row that of one slot."""
    taken = jax.vmap(lambda lane, ids, slots: lane.at[ids, slots].get(mode="clip"))(
        mask, rows, slot.reshape(rows.shape)
    )
    return taken.reshape(-1, taken.shape[-1])


def silence(p: RowSampling, idle: Bool[Array, "B"]) -> RowSampling:
    """Rows that do not sample ask for nothing, so that no optional work runs for padding and
    half-read prompts.
    """

    def where(field: jax.Array, value: float) -> jax.Array:
        return jnp.where(idle, jnp.asarray(value, field.dtype), field)

    return replace(
        p,
        temperature=where(p.temperature, 0),
        logprobs=where(p.logprobs, -1),
        end_after=where(p.end_after, 0),
        biased=where(p.biased, 0),
        masked=where(p.masked, 0),
        penalised=where(p.penalised, 0),
    )


class Sampled(NamedTuple):
    tokens: Int[Array, "B"]
    finite: Bool[Array, "B"]
    logprob: Float[Array, "B"]
    top_ids: Int[Array, "B 20"]
    top_logprobs: Float[Array, "B 20"]


def sample(
    logits: Float[Array, "B V"],
    p: RowSampling,
    fields: RowFields,
    rows: Int[Array, "A r"],
    position: Int[Array, "B"],
    drafted: Int[Array, "B k"] | None = None,
) -> Sampled:
    """One token each, B = A*r. rows: where each one's `fields` stand. position: the position the
    new token takes.

    drafted: tokens between what `fields` count and the new one, padded with V; None where there
    never is one.
    """
    slot = jnp.zeros_like(position) if drafted is None else (drafted < logits.shape[-1]).sum(-1)
    processed = penalise(edit(logits, p, fields, rows, slot, position), p, fields, rows, drafted)
    tokens = choose(processed, p, position)
    logprob, top_ids, top_logprobs = lax.cond(
        jnp.any(p.logprobs >= 0), log_probabilities, _no_log_probabilities, logits, tokens
    )
    finite = jnp.isfinite(
        jnp.abs(logits).max(-1)
    )  # of a large V, compiles faster than isfinite(logits).all(-1)
    return Sampled(tokens, finite, logprob, top_ids, top_logprobs)


def edit(
    logits: Float[Array, "B V"],
    p: RowSampling,
    fields: RowFields,
    rows: Int[Array, "A r"],
    slot: Int[Array, "B"],
    position: Int[Array, "B"],
) -> Float[Array, "B V"]:
    """Allowed tokens, logit bias, and no end token before min_tokens. slot: drafted tokens before
    the new one.
    """
    vocab = logits.shape[-1]
    early = position < p.end_after

    def apply(logits: jax.Array) -> jax.Array:
        token = jnp.arange(vocab)
        words = _take_masks(fields.mask, rows, slot)[:, token // 32]
        allowed = (words >> (token % 32).astype(jnp.uint32)[None]) & 1
        logits = jnp.where((p.masked[:, None] == 0) | (allowed == 1), logits, -jnp.inf)
        batch = jnp.arange(logits.shape[0])[:, None]
        bias_ids = jnp.where(p.biased[:, None] == 1, take_rows(fields.bias_ids, rows), vocab)
        logits = logits.at[batch, bias_ids].add(take_rows(fields.bias_values, rows), mode="drop")
        ends = jnp.where(early[:, None], p.end_ids, vocab)
        return logits.at[batch, ends].set(-jnp.inf, mode="drop")

    return lax.cond(
        jnp.any((p.masked == 1) | (p.biased == 1) | early), apply, lambda logits: logits, logits
    )


def penalise(
    logits: Float[Array, "B V"],
    p: RowSampling,
    fields: RowFields,
    rows: Int[Array, "A r"],
    drafted: Int[Array, "B k"] | None,
) -> Float[Array, "B V"]:
    """Repetition penalty as Keskar et al. 2019 (CTRL), then presence and frequency penalty as
    OpenAI defines them.
    """

    def apply(logits: jax.Array) -> jax.Array:
        counts = take_rows(fields.counts, rows)
        if drafted is not None:
            counts = counts.at[jnp.arange(len(counts))[:, None], drafted].add(2, mode="drop")
        produced = (counts >> 1).astype(jnp.float32)
        repetition = p.repetition[:, None]
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        result = jnp.where(counts > 0, repeated, logits)
        result = (
            result
            - p.presence[:, None] * jnp.minimum(produced, 1)
            - p.frequency[:, None] * produced
        )
        return jnp.where(p.penalised[:, None] == 1, result, logits)

    return lax.cond(jnp.any(p.penalised == 1), apply, lambda logits: logits, logits)


def choose(
    logits: Float[Array, "B V"], p: RowSampling, position: Int[Array, "B"]
) -> Int[Array, "B"]:
    """The most probable token at temperature 0; else a draw from what min_p, top_k and top_p leave,
    by Gumbel-max.
    """

    def draw(logits: jax.Array) -> jax.Array:
        below_peak = logits - logits.max(
            -1, keepdims=True
        )  # so that no temperature, however low, gives inf
        scaled = below_peak / jnp.where(p.temperature > 0, p.temperature, 1)[:, None]
        noisy = truncate(scaled, p) + gumbel(p.key, p.choice, position, logits.shape[-1])
        return jnp.where(p.temperature[:, None] > 0, noisy, logits)

    return jnp.argmax(
        lax.cond(jnp.any(p.temperature > 0), draw, lambda logits: logits, logits), axis=-1
    )


def truncate(logits: Float[Array, "B V"], p: RowSampling) -> Float[Array, "B V"]:
    """-inf outside min_p (of the largest probability), then top_k, then top_p (of what is left).
    Ties stay in.

    logits: scaled by the temperature, the largest of a row at 0.
    """

    def apply(logits: jax.Array) -> jax.Array:
        logits = jnp.where(logits >= jnp.log(p.min_p)[:, None], logits, -jnp.inf)
        k = jnp.where(p.top_k > 0, p.top_k, logits.shape[-1]).astype(jnp.float32)
        logits = _keep_mass(logits, jnp.ones_like(logits), k)
        mass = jnp.exp(logits)
        target = jnp.where(p.top_p < 1, p.top_p * mass.sum(-1), jnp.inf)
        return _keep_mass(logits, mass, target)

    asked = (p.temperature > 0) & ((p.top_k > 0) | (p.top_p < 1) | (p.min_p > 0))
    return lax.cond(jnp.any(asked), apply, lambda logits: logits, logits)


def _keep_mass(
    logits: Float[Array, "B V"], mass: Float[Array, "B V"], target: Float[Array, "B"]
) -> Float[Array, "B V"]:
    """Keep the largest logits whose masses reach `target` together (all when they never do); the
    others become -inf.
    """
    order = _ordered(logits)

    def add_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        higher = threshold | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        reached = jnp.where(order >= higher[:, None], mass, 0).sum(-1) >= target
        return jnp.where(reached, higher, threshold)

    # The highest threshold that reaches the target, bit by bit from the top.
    threshold = lax.fori_loop(0, 32, add_bit, jnp.zeros(logits.shape[0], jnp.uint32))
    return jnp.where(order >= threshold[:, None], logits, -jnp.inf)


def _ordered(x: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Unsigned integers in the order of the floats, the same for 0.0 and -0.0."""
    sign = jnp.uint32(1 << 31)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits = jnp.where(bits == sign, 0, bits)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def gumbel(
    key: UInt32[Array, "B 2"], choice: Int[Array, "B"], position: Int[Array, "B"], vocab: int
) -> Float[Array, "B V"]:
    """Noise that depends on seed, choice index and absolute position only (threefry2x32)."""

    def one_row(key: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
        folded = jax.random.wrap_key_data(key, impl="threefry2x32")
        data = jnp.stack([choice, position, jnp.int32(TOKEN_NOISE)])
        # A loop: three calls would compile three copies of threefry.
        folded = lax.fori_loop(
            0, len(data), lambda i, key: jax.random.fold_in(key, data[i]), folded
        )
        # mode "high": with 23 random bits a token of probability 1e-7 would come half as often as
        # it should.
        return jax.random.gumbel(folded, (vocab,), jnp.float32, mode="high")

    return jax.vmap(one_row)(key, choice, position)


def log_probabilities(
    logits: Float[Array, "B V"], tokens: Int[Array, "B"]
) -> tuple[Float[Array, "B"], Int[Array, "B 20"], Float[Array, "B 20"]]:
    """Of the given tokens and of the 20 most probable; a smaller vocabulary is padded with id -1
    and -inf.
    """
    peak = logits.max(-1, keepdims=True)
    total = jnp.log(jnp.exp(logits - peak).sum(-1, keepdims=True))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1) - peak - total
    top, ids = _top(logits, min(MAX_LOGPROBS, logits.shape[-1]))
    missing = ((0, 0), (0, MAX_LOGPROBS - top.shape[-1]))
    top = jnp.pad(top - peak - total, missing, constant_values=-jnp.inf)
    return chosen[:, 0], jnp.pad(ids, missing, constant_values=-1), top


def _top(logits: Float[Array, "B V"], count: int) -> tuple[Float[Array, "B n"], Int[Array, "B n"]]:
    """lax.top_k in passes of 16: on a GPU it is a kernel up to there and a full sort beyond."""
    top, ids = lax.top_k(logits, min(count, 16))
    if count <= 16:
        return top, ids
    rest = logits.at[jnp.arange(logits.shape[0])[:, None], ids].set(-jnp.inf)
    more, more_ids = lax.top_k(rest, count - 16)
    return jnp.concatenate([top, more], -1), jnp.concatenate([ids, more_ids], -1)


def _no_log_probabilities(
    logits: Float[Array, "B V"], tokens: Int[Array, "B"]
) -> tuple[Float[Array, "B"], Int[Array, "B 20"], Float[Array, "B 20"]]:
    rows = logits.shape[0]
    return (
        jnp.zeros(rows),
        jnp.zeros((rows, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((rows, MAX_LOGPROBS)),
    )
