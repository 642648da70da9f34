"""The compiled steps: pure functions of parameters, state and one packed upload.

upload -> where every token lies -> decoder -> logits of the sampling rows -> tokens -> state and
one packed download

In place of logits and tokens, an embed step has embeddings.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.batch import Packed, download_layout, upload_layout
from jaxserve.engine.device.drafting import Computed, Drafter, draft_tokens, filled
from jaxserve.engine.device.sampling import (
    RowSampling,
    Sampled,
    log_probabilities,
    sample,
    silence,
    take_rows,
)
from jaxserve.engine.device.sharded_model import Network, by_lane, rows_of
from jaxserve.engine.device.state import Rows, State
from jaxserve.engine.device.token_layout import Place, last, locate, put, take
from jaxserve.engine.plan import FED_BACK
from jaxserve.models.decoder import embeddings
from jaxserve.models.spec import ModelSpec

SCORE_TOKENS = 64  # hidden states per slice of the head, so that no [T, V] array exists

Batch = dict[str, jax.Array]


class _Slots(NamedTuple):
    """Where tokens are sampled: S for each row, behind its newest token and behind each drafted
    one.

    k = S - 1, and padding of drafted tokens is V.
    """

    live: Bool[Array, "A R S"]  # whether the row has so many
    token: Int[Array, "A R S"]  # which packed token it comes after
    position: Int[Array, "A R S"]  # that the sampled token takes
    drafted: Int[Array, "A R S"]  # what was drafted for that position; of the last slot: nothing, V
    before: Int[Array, "A R S k"]  # drafted tokens before it


@dataclass(frozen=True)
class StepBuilder:
    """What all steps of an engine share; `step(bucket)` gives the function to compile."""

    network: Network
    drafter: Drafter | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.network.spec

    def step(self, bucket: Bucket) -> Callable[[dict, State, jax.Array], tuple[State, jax.Array]]:
        groups = len(self.spec.page_groups())
        upload = upload_layout(bucket, groups, self.network.page_size)
        download = download_layout(bucket, self.spec.d_model)

        def run(
            params: dict, state: State, packed: Int[Array, "A n"]
        ) -> tuple[State, Int[Array, "A m"]]:
            params, batch = self.network.place_weights(params), upload.unpack(packed)
            state = replace(state, rows=_place_fresh_pages(state.rows, batch))
            if bucket.kind == "draft":
                state, results = self._catch_up(bucket, params, state, batch)
            elif bucket.steps > 1:
                state, results = self._several_decodes(bucket, params, state, batch)
            else:
                place = locate(
                    take(state.rows.length, batch["rows"]), batch["sizes"], bucket.tokens
                )
                if bucket.kind == "verify" and self.drafter:
                    state, batch = self._draft(self.drafter, bucket, params, state, batch, place)
                state, results = self._compute(bucket, params, state, batch, place)
            return state, download.pack_on_device(results)

        return run

    def _compute(
        self, bucket: Bucket, params: dict, state: State, batch: Batch, place: Place
    ) -> tuple[State, Batch]:
        """All of the batch's tokens once through the model; the state after it, and what is to be
        reported.
        """
        rows = state.rows
        tokens = self._tokens(rows, batch, place)
        tables = rows_of(rows.tables, batch["rows"])
        done = self.network.forward(
            params, state.pages, tables, tokens, place, bucket.max_row_tokens
        )
        per_lane = done.hidden.reshape(*tokens.shape, -1)
        load = None if state.load is None else state.load + jnp.asarray(done.load, jnp.uint32)
        state = replace(state, pages=done.pages, load=load)
        if bucket.kind == "embed":
            rows, results = self._embed(params, rows, batch, per_lane, place)
            return replace(state, rows=rows), results
        slots = _slots(bucket, batch, tokens, place, self.spec.vocab_size)
        sampled = self._sample(params, rows, batch, per_lane, slots)
        taken = _taken(slots, sampled)
        if self.drafter:
            newest = _newest(slots.token, taken)
            computed = Computed(batch["rows"], tokens, per_lane, place, slots.live[..., 0], newest)
            state = replace(state, drafter=self.drafter.read(params, state, computed))
        results = _results(sampled, taken)
        if bucket.kind == "score":
            results |= self._scores(params, per_lane, batch["targets"])
        return replace(state, rows=_advance(rows, batch, place, slots, sampled, taken)), results

    def _draft(
        self,
        drafter: Drafter,
        bucket: Bucket,
        params: dict,
        state: State,
        batch: Batch,
        place: Place,
    ) -> tuple[State, Batch]:
        """The batch with the tokens that are to be verified."""
        vocab = self.spec.vocab_size
        state, drafted = draft_tokens(
            drafter, self.network.mesh, params, state, batch, bucket.drafts, vocab
        )
        return state, batch | {"tokens": filled(batch["tokens"], drafted, place)}

    def _catch_up(
        self, bucket: Bucket, params: dict, state: State, batch: Batch
    ) -> tuple[State, Batch]:
        """Known tokens through the draft model alone: of a row, those that its pages lack."""
        assert self.drafter
        place = locate(batch["starts"], batch["sizes"], bucket.tokens)
        kept, hidden = self.drafter.catch_up(params, state, batch["rows"], batch["tokens"], place)
        return replace(state, drafter=kept), {"finite": jnp.isfinite(last(hidden, place)).all(-1)}

    def _embed(
        self, params: dict, rows: Rows, batch: Batch, hidden: Float[Array, "A T D"], place: Place
    ) -> tuple[Rows, Batch]:
        """An embedding for every row, as if its prompt ended with the chunk; rows after it, and
        what is reported.
        """
        ends = last(hidden, place)
        found = embeddings(params, self.spec, ends.reshape(-1, self.spec.d_model)).reshape(
            ends.shape
        )
        rows = replace(rows, length=put(rows.length, batch["rows"], place.lengths))
        return rows, {"embedding": found, "finite": jnp.isfinite(found).all(-1)}

    def _several_decodes(
        self, bucket: Bucket, params: dict, state: State, batch: Batch
    ) -> tuple[State, Batch]:
        """`bucket.steps` decodes, each feeding the next; sizes: how many of them each row may take.

        A scan of fixed length: on a GPU, a loop with a condition would ask the host before every
        turn. A row that is done takes part at its last position, but writes nothing and reports
        nothing.
        """
        ids, sizes = batch["rows"], batch["sizes"]

        def decode(
            carry: tuple[State, jax.Array], step: jax.Array
        ) -> tuple[tuple[State, jax.Array], Batch]:
            state, going = carry
            going = going & (step < sizes)
            # A size of 0 would shift the packing: so a row that is done goes back by one, and is as
            # long as before.
            begin = take(state.rows.length, ids) - jnp.where(going, 0, 1)
            one_each = batch | {
                "sizes": (sizes > 0).astype(jnp.int32),
                "samples": going.astype(jnp.int32),
            }
            place = locate(begin, one_each["sizes"], bucket.tokens)
            place = place._replace(live=place.live & going)  # token t is row t's
            state, found = self._compute(bucket, params, state, one_each, place)
            ended = (
                _ended(state.rows, ids, found["tokens"][..., 0], place.lengths) | ~found["finite"]
            )
            return (state, going & ~ended), found | {"finite": found["finite"] | ~going}

        (state, _), found = lax.scan(decode, (state, sizes > 0), jnp.arange(bucket.steps))
        # [K, A, R] of rows; [K, A, R, 1, ...] of tokens become [A, R, K, ...]
        per_row = {"n_new": found["n_new"].sum(0), "finite": found["finite"].all(0)}
        per_token = {
            name: jnp.moveaxis(x[:, :, :, 0], 0, 2)
            for name, x in found.items()
            if name not in per_row
        }
        return state, per_row | per_token

    def _tokens(self, rows: Rows, batch: Batch, place: Place) -> Int[Array, "A T"]:
        """Ids from the upload, or the row's newest token where the host does not know it yet."""
        newest = take(rows.token, batch["rows"])
        if "tokens" not in batch:  # decode: one token per row
            return newest
        return jnp.where(batch["tokens"] == FED_BACK, take(newest, place.chunk), batch["tokens"])

    def _sample(
        self, params: dict, rows: Rows, batch: Batch, hidden: jax.Array, slots: _Slots
    ) -> Sampled:
        """The token after each of a chunk's last hidden states; fields [A, R, S, ...]."""
        lanes, count, width = slots.live.shape
        states = take(hidden, slots.token.reshape(lanes, -1))
        values = self.network.logits(params, states.reshape(-1, states.shape[-1]))
        ids = jnp.repeat(batch["rows"], width, axis=-1)
        sampling = jax.tree.map(lambda field: take_rows(field, ids), rows.sampling)
        sampling = silence(sampling, ~slots.live.reshape(-1))
        # jaxlib 0.11.2 crashes when it compiles a shard_map that is given an array without
        # elements.
        before = slots.before.reshape(lanes * count * width, -1) if width > 1 else None
        found = by_lane(self.network.mesh, sample)(
            values, sampling, rows.fields, ids, slots.position.reshape(-1), before
        )
        return jax.tree.map(lambda x: x.reshape(lanes, count, width, *x.shape[1:]), found)

    def _scores(self, params: dict, hidden: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
        """Log-probability of every token's target, the head running over slices of tokens."""
        lanes, tokens, width = hidden.shape
        step = min(SCORE_TOKENS, tokens)
        slices = -(-tokens // step)
        padding = slices * step - tokens

        def score(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            hidden, targets = part
            values = self.network.logits(params, hidden.reshape(-1, width))
            found = by_lane(self.network.mesh, log_probabilities)(values, targets.reshape(-1))
            return jax.tree.map(lambda x: x.reshape(lanes, step, *x.shape[1:]), found)

        split_hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0))).reshape(
            lanes, slices, step, width
        )
        split_targets = jnp.pad(targets, ((0, 0), (0, padding))).reshape(lanes, slices, step)
        found = lax.map(score, (split_hidden.swapaxes(0, 1), split_targets.swapaxes(0, 1)))
        whole = [
            x.swapaxes(0, 1).reshape(lanes, slices * step, *x.shape[3:])[:, :tokens] for x in found
        ]
        return dict(
            zip(("target_logprob", "target_top_ids", "target_top_logprobs"), whole, strict=True)
        )


def _place_fresh_pages(rows: Rows, batch: Batch) -> Rows:
    def place(table: jax.Array, row: jax.Array, index: jax.Array, page: jax.Array) -> jax.Array:
        return table.at[row, index].set(page, mode="drop")

    tables = tuple(
        jax.vmap(place)(
            table, batch["fresh_row"][:, g], batch["fresh_index"][:, g], batch["fresh_page"][:, g]
        )
        for g, table in enumerate(rows.tables)
    )
    return replace(rows, tables=tables)


def _slots(
    bucket: Bucket, batch: Batch, tokens: Int[Array, "A T"], place: Place, vocab: int
) -> _Slots:
    samples, slot = batch["samples"][..., None], jnp.arange(1 + bucket.drafts)[None, None]
    behind = jnp.maximum(samples, 1) - slot  # the chunk's end, in tokens
    token = jnp.maximum(place.starts[:, 1:, None] - behind, 0)
    lanes = token.shape[0]
    following = take(tokens, (token + 1).reshape(lanes, -1)).reshape(token.shape)
    drafted = jnp.where(slot + 1 < samples, following, vocab)
    earlier = slot[..., None, :-1] < slot[..., None]
    return _Slots(
        live=slot < samples,
        token=token,
        position=place.lengths[..., None] - behind + 1,
        drafted=drafted,
        before=jnp.where(earlier, drafted[:, :, None, :-1], vocab),
    )


def _taken(slots: _Slots, sampled: Sampled) -> Int[Array, "A R"]:
    """How many of a row's sampled tokens count: up to the first that is not what was drafted, or is
    not finite.
    """
    right = (sampled.tokens == slots.drafted) & sampled.finite
    return jnp.where(slots.live[..., 0], 1 + jnp.cumprod(right, axis=-1).sum(-1), 0)


def _newest(field: Shaped[Array, "A R S"], taken: Int[Array, "A R"]) -> Shaped[Array, "A R"]:
    return jnp.take_along_axis(field, jnp.maximum(taken - 1, 0)[..., None], axis=-1)[..., 0]


def _advance(
    rows: Rows,
    batch: Batch,
    place: Place,
    slots: _Slots,
    sampled: Sampled,
    taken: Int[Array, "A R"],
) -> Rows:
    """Rows after the step: longer, with their new tokens, and counted for penalties."""
    ids, live = batch["rows"], slots.live[..., 0]
    token = jnp.where(live, _newest(sampled.tokens, taken), take(rows.token, ids))
    new = jnp.arange(slots.live.shape[-1])[None, None] < taken[..., None]
    counted = 2 * (new & (take(rows.sampling.penalised, ids) == 1)[..., None]).astype(jnp.int32)
    counts = jax.vmap(lambda lane, row, token, n: lane.at[row[:, None], token].add(n, mode="drop"))(
        rows.fields.counts, ids, sampled.tokens, counted
    )
    return replace(
        rows,
        length=put(rows.length, ids, place.lengths - jnp.where(live, batch["samples"] - taken, 0)),
        token=put(rows.token, ids, token),
        fields=replace(rows.fields, counts=counts),
    )


def _ended(
    rows: Rows, ids: Int[Array, "A R"], tokens: Int[Array, "A R"], position: Int[Array, "A R"]
) -> Bool[Array, "A R"]:
    """Whether a row's new token, at this position, ends it: as the scheduler decides it."""
    ends = (tokens[..., None] == take(rows.sampling.end_ids, ids)).any(-1)
    return ends & (position >= take(rows.sampling.end_after, ids))


def _results(sampled: Sampled, taken: Int[Array, "A R"]) -> Batch:
    """StepOutput's fields, [A, R, ...]."""
    return {
        "n_new": taken,
        "tokens": sampled.tokens,
        "finite": _newest(sampled.finite, taken),
        "logprob": sampled.logprob,
        "top_ids": sampled.top_ids,
        "top_logprobs": sampled.top_logprobs,
    }


# ---- the small writers


def admit_row(layout: Packed, state: State, packed: Int[Array, "n"]) -> State:
    """Write the small fields of a row that a sequence enters. layout: batch.admission_layout."""
    values = layout.unpack(packed)
    at = values["lane"], values["row"]
    rows = state.rows
    sampling = RowSampling(
        **{
            f.name: getattr(rows.sampling, f.name).at[at].set(values[f.name])
            for f in fields(RowSampling)
        }
    )
    tables = tuple(table.at[at].set(values["table"][g]) for g, table in enumerate(rows.tables))
    length = rows.length.at[at].set(values["length"])
    return replace(state, rows=replace(rows, sampling=sampling, tables=tables, length=length))


def set_counts(state: State, at: Int[Array, "2"], counts: Int[Array, "V"]) -> State:
    return _set_fields(state, at, counts=counts)


def set_bias(
    state: State, at: Int[Array, "2"], ids: Int[Array, "1024"], values: jax.Array
) -> State:
    return _set_fields(state, at, bias_ids=ids, bias_values=values)


def set_masks(state: State, at: Int[Array, "N 2"], masks: UInt32[Array, "N S V/32"]) -> State:
    """Of several rows; those that are out of range are padding."""
    old = state.rows.fields
    mask = old.mask.at[at[:, 0], at[:, 1]].set(masks, mode="drop")
    return replace(state, rows=replace(state.rows, fields=replace(old, mask=mask)))


def _set_fields(state: State, at: Int[Array, "2"], **values: jax.Array) -> State:
    """Write large fields of the row at (lane, row)."""
    old = state.rows.fields
    new = {name: getattr(old, name).at[at[0], at[1]].set(value) for name, value in values.items()}
    return replace(state, rows=replace(state.rows, fields=replace(old, **new)))
