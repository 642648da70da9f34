"""Sampling slots of a step: where tokens are sampled, which of them count, and the rows afterwards.

A row that verifies k drafted tokens samples in S = k + 1 slots: behind its newest token and behind
each drafted one. The tokens count up to the first that differs from what was drafted in its place.
In shapes, A counts lanes, R the chunks of a lane, and V the vocabulary.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.lane_index import add, put, take
from jaxserve.engine.device.sampling import SMALL_FIELDS, Sampled, unpack_sampling
from jaxserve.engine.device.state import Rows
from jaxserve.engine.device.thoughts import thoughts_after
from jaxserve.engine.device.token_layout import TokenLayout

Batch = dict[str, jax.Array]


class SampleSlots(NamedTuple):
    """Sampling slots of every chunk; missing drafted tokens are padded with V."""

    live: Bool[Array, "A R S"]  # False for slots that the chunk does not have
    token: Int[Array, "A R S"]  # index of the packed token that the slot comes after
    position: Int[Array, "A R S"]  # that the sampled token takes
    drafted: Int[Array, "A R S"]  # the drafted token for that position; V in the last slot
    before: Int[Array, "A R S k"]  # drafted tokens before it


def sample_slots(
    bucket: Bucket, batch: Batch, tokens: Int[Array, "A T"], layout: TokenLayout, vocab: int
) -> SampleSlots:
    """Find the sampling slots of a step among all packed `tokens`, which include drafted ones."""
    samples = batch["samples"][..., None]
    slot = jnp.arange(1 + bucket.drafts)[None, None]
    # Distance from the end of the chunk: its last `samples` tokens have a slot behind each.
    from_end = jnp.maximum(samples, 1) - slot
    token = jnp.maximum(layout.starts[:, 1:, None] - from_end, 0)
    lanes = token.shape[0]
    following = take(tokens, (token + 1).reshape(lanes, -1)).reshape(token.shape)
    drafted = jnp.where(slot + 1 < samples, following, vocab)
    earlier = slot[..., None, :-1] < slot[..., None]
    return SampleSlots(
        live=slot < samples,
        token=token,
        position=layout.lengths[..., None] - from_end + 1,
        drafted=drafted,
        before=jnp.where(earlier, drafted[:, :, None, :-1], vocab),
    )


def accepted_tokens(slots: SampleSlots, sampled: Sampled) -> Int[Array, "A R"]:
    """Count each chunk's sampled tokens that are part of the text; 0 where it samples none.

    The first always is. Each further one is, as long as those before it are finite and what was
    drafted.
    """
    as_drafted = (sampled.tokens == slots.drafted) & sampled.finite
    return jnp.where(slots.live[..., 0], 1 + jnp.cumprod(as_drafted, axis=-1).sum(-1), 0)


def newest(field: Shaped[Array, "A R S"], accepted: Int[Array, "A R"]) -> Shaped[Array, "A R"]:
    """Return a field's value in the slot of the last accepted token; slot 0 where none is."""
    if field.shape[-1] == 1:
        return field[..., 0]
    return jnp.take_along_axis(field, jnp.maximum(accepted - 1, 0)[..., None], axis=-1)[..., 0]


def advance(
    rows: Rows,
    batch: Batch,
    layout: TokenLayout,
    slots: SampleSlots,
    sampled: Sampled,
    accepted: Int[Array, "A R"],
) -> Rows:
    """Return the rows after a step: longer, with their new tokens, and counted for penalties."""
    ids = batch["rows"]
    live = slots.live[..., 0]
    token = jnp.where(live, newest(sampled.tokens, accepted), take(rows.token, ids))
    new = jnp.arange(slots.live.shape[-1])[None, None] < accepted[..., None]
    # 2: one more occurrence in the output, see LargeRowFields.counts.
    packed = take(rows.sampling, ids)
    sampling = unpack_sampling(packed)
    counted = 2 * (new & (sampling.penalised == 1)[..., None]).astype(jnp.int32)
    row = jnp.broadcast_to(ids[..., None], sampled.tokens.shape)
    counts = add(rows.fields.counts, counted, row, sampled.tokens)
    after = thoughts_after(sampling, sampled.tokens, slots.position, new)
    packed = SMALL_FIELDS.replace_fields(
        packed, closes_at=after.closes_at, opens_at=after.opens_at, gap=after.gap
    )
    # The keys and values of rejected drafts lie behind a row's length, where steps overwrite them.
    rejected = jnp.where(live, batch["samples"] - accepted, 0)
    return replace(
        rows,
        length=put(rows.length, layout.lengths - rejected, ids),
        token=put(rows.token, token, ids),
        sampling=put(rows.sampling, packed, ids),
        fields=replace(rows.fields, counts=counts),
    )


def ended(
    rows: Rows, ids: Int[Array, "A R"], tokens: Int[Array, "A R"], position: Int[Array, "A R"]
) -> Bool[Array, "A R"]:
    """Tell which rows are ended by their new token at this position, by the scheduler's rule."""
    sampling = unpack_sampling(take(rows.sampling, ids))
    is_end = (tokens[..., None] == sampling.end_ids).any(-1)
    return is_end & (position >= sampling.end_after)


def sampled_results(sampled: Sampled, accepted: Int[Array, "A R"]) -> Batch:
    """Collect the fields of a step's download, each [A, R, ...]."""
    return {
        "n_new": accepted,
        "tokens": sampled.tokens,
        "finite": newest(sampled.finite, accepted),
        "logprob": sampled.logprob,
        "top_ids": sampled.top_ids,
        "top_logprobs": sampled.top_logprobs,
    }
