"""The compiled steps: pure functions of parameters, state and one packed upload.

upload -> where every token lies -> decoder -> logits of the sampling rows -> tokens -> state and one packed download

In place of logits and tokens, an embed step has embeddings.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from jaxserve.engine.attention import attention_options
from jaxserve.engine.batch import Packed, download_layout, upload_layout
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.plan import FED_BACK
from jaxserve.engine.sampling import RowSampling, Sampled, log_probabilities, sample, silence, take_rows
from jaxserve.engine.state import Rows, State
from jaxserve.models.attend import Attend
from jaxserve.models.decoder import embeddings, forward, logits
from jaxserve.models.moe import Experts
from jaxserve.models.quant import Placed
from jaxserve.models.quantized_product import place_weights
from jaxserve.models.spec import ModelSpec
from pallas_kernels.grouped_matmul.api import GroupedMatmul
from pallas_kernels.paged_attention.api import PagedAttention, Ragged
from sharding.rules import LANES

SCORE_TOKENS = 64  # hidden states per slice of the head, so that no [T, V] array exists

Batch = dict[str, jax.Array]


class _Place(NamedTuple):
    """Where the packed tokens of a step lie."""

    lengths: Int[Array, "A R"]  # of each chunk's row once the step is done; 0 for padding
    starts: Int[Array, "A R+1"]  # chunk r's tokens are starts[r]:starts[r+1]
    split: Int[Array, "A 2"]  # chunks of one token, which come first; chunks that are no padding
    chunk: Int[Array, "A T"]  # of each token
    position: Int[Array, "A T"]  # of each token in its sequence; 0 for padding
    live: Bool[Array, "A T"]  # whether it is a token at all


class _Slots(NamedTuple):
    """Where tokens are sampled: S for each row, behind its newest token and behind each drafted one.

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

    spec: ModelSpec
    mesh: Mesh
    kernel: PagedAttention
    grouped: GroupedMatmul
    placed: Mapping[str, Placed]  # weights with a kernel, by name
    page_size: int
    dtype: jnp.dtype  # of pages

    def step(self, bucket: Bucket) -> Callable[[dict, State, jax.Array], tuple[State, jax.Array]]:
        groups = len(self.spec.page_groups())
        upload = upload_layout(bucket, groups, self.page_size)
        download = download_layout(bucket, self.spec.d_model)

        def run(params: dict, state: State, packed: Int[Array, "A n"]) -> tuple[State, Int[Array, "A m"]]:
            params, batch = place_weights(params, self.placed), upload.unpack(packed)
            state = replace(state, rows=_place_fresh_pages(state.rows, batch))
            if bucket.steps > 1:
                state, results = self._several_decodes(bucket, params, state, batch)
            else:
                place = _locate(state.rows, batch, bucket.tokens)
                state, results = self._compute(bucket, params, state, batch, place)
            return state, download.pack_on_device(results)

        return run

    def _compute(self, bucket: Bucket, params: dict, state: State, batch: Batch, place: _Place) -> tuple[State, Batch]:
        """All of the batch's tokens once through the model; the state after it, and what is to be reported."""
        rows = state.rows
        tokens = self._tokens(rows, batch, place)
        attends = self._attends(bucket, rows, batch, state, place)
        experts = Experts(place.live.reshape(-1), self.spec, self.mesh, self.grouped) if self.spec.mixture else None
        positions = place.position.reshape(-1)
        done = forward(params, self.spec, state.pages, tokens.reshape(-1), positions, attends, experts)
        per_lane = done.hidden.reshape(*tokens.shape, -1)
        if bucket.kind == "embed":
            rows, results = self._embed(params, rows, batch, per_lane, place)
        else:
            slots = _slots(bucket, batch, tokens, place, self.spec.vocab_size)
            rows, results = self._generate(params, rows, batch, per_lane, place, slots)
        if bucket.kind == "score":
            results |= self._scores(params, per_lane, batch["targets"])
        load = None if state.load is None else state.load + jnp.asarray(done.load, jnp.uint32)
        return State(done.pages, rows, load), results

    def _generate(
        self, params: dict, rows: Rows, batch: Batch, hidden: Float[Array, "A T D"], place: _Place, slots: _Slots
    ) -> tuple[Rows, Batch]:
        """A token for every row, and for every draft that proves right: the rows after it, and what is reported."""
        sampled = self._sample(params, rows, batch, hidden, slots)
        taken = _taken(slots, sampled)
        return _advance(rows, batch, place, slots, sampled, taken), _results(sampled, taken)

    def _embed(
        self, params: dict, rows: Rows, batch: Batch, hidden: Float[Array, "A T D"], place: _Place
    ) -> tuple[Rows, Batch]:
        """The same of an embed step: an embedding for every row, as if its prompt ended with the chunk."""
        last = _last(hidden, place)
        found = embeddings(params, self.spec, last.reshape(-1, self.spec.d_model)).reshape(last.shape)
        rows = replace(rows, length=_put(rows.length, batch["rows"], place.lengths))
        return rows, {"embedding": found, "finite": jnp.isfinite(found).all(-1)}

    def _several_decodes(self, bucket: Bucket, params: dict, state: State, batch: Batch) -> tuple[State, Batch]:
        """`bucket.steps` decodes, each feeding the next; sizes: how many of them each row may take.

        A scan of fixed length: on a GPU, a loop with a condition would ask the host before every turn. A row that is
        done takes part at its last position, but writes nothing and reports nothing.
        """
        ids, sizes = batch["rows"], batch["sizes"]

        def decode(carry: tuple[State, jax.Array], step: jax.Array) -> tuple[tuple[State, jax.Array], Batch]:
            state, going = carry
            going = going & (step < sizes)
            # A size of 0 would shift the packing: so a row that is done goes back by one, and is as long as before.
            length = _add(state.rows.length, ids, jnp.where(going, 0, -1))
            state = replace(state, rows=replace(state.rows, length=length))
            one_each = batch | {"sizes": (sizes > 0).astype(jnp.int32), "samples": going.astype(jnp.int32)}
            place = _locate(state.rows, one_each, bucket.tokens)
            place = place._replace(live=place.live & going)  # token t is row t's
            state, found = self._compute(bucket, params, state, one_each, place)
            ended = _ended(state.rows, ids, found["tokens"][..., 0], place.lengths) | ~found["finite"]
            return (state, going & ~ended), found | {"finite": found["finite"] | ~going}

        (state, _), found = lax.scan(decode, (state, sizes > 0), jnp.arange(bucket.steps))
        # [K, A, R] of rows; [K, A, R, 1, ...] of tokens become [A, R, K, ...]
        per_row = {"n_new": found["n_new"].sum(0), "finite": found["finite"].all(0)}
        per_token = {name: jnp.moveaxis(x[:, :, :, 0], 0, 2) for name, x in found.items() if name not in per_row}
        return state, per_row | per_token

    def _tokens(self, rows: Rows, batch: Batch, place: _Place) -> Int[Array, "A T"]:
        """Ids from the upload, or the row's newest token where the host does not know it yet."""
        newest = _take(rows.token, batch["rows"])
        if "tokens" not in batch:  # decode: one token per row
            return newest
        return jnp.where(batch["tokens"] == FED_BACK, _take(newest, place.chunk), batch["tokens"])

    def _attends(self, bucket: Bucket, rows: Rows, batch: Batch, state: State, place: _Place) -> tuple[Attend, ...]:
        """One Attend per layer; layers of a page group share theirs."""
        by_layer: dict[int, Attend] = {}
        for group, table in zip(self.spec.page_groups(), rows.tables, strict=True):
            tables = _take(table, batch["rows"])
            index = place.position // self.page_size
            entry = jax.vmap(lambda t, chunk, i: t[chunk, i])(tables, place.chunk, index)
            no_page = state.pages[group.layers[0]].k.shape[1]
            page, offset = jnp.where(place.live, entry, no_page), place.position % self.page_size
            ragged = Ragged(tables, place.lengths, place.starts, place.split, page, offset)
            options = attention_options(self.spec, group, self.mesh, self.page_size, self.dtype, bucket.most)
            by_layer |= dict.fromkeys(group.layers, Attend(ragged, self.mesh, self.kernel, options))
        return tuple(by_layer[i] for i in range(self.spec.num_layers))

    def _sample(self, params: dict, rows: Rows, batch: Batch, hidden: jax.Array, slots: _Slots) -> Sampled:
        """The token after each of a chunk's last hidden states; fields [A, R, S, ...]."""
        lanes, count, width = slots.live.shape
        states = _take(hidden, slots.token.reshape(lanes, -1))
        values = self._logits(params, states.reshape(-1, states.shape[-1]))
        ids = jnp.repeat(batch["rows"], width, axis=-1)
        sampling = jax.tree.map(lambda field: take_rows(field, ids), rows.sampling)
        sampling = silence(sampling, ~slots.live.reshape(-1))
        before = slots.before.reshape(lanes * count * width, -1)
        found = self._by_lane(sample)(values, sampling, rows.fields, ids, slots.position.reshape(-1), before)
        return jax.tree.map(lambda x: x.reshape(lanes, count, width, *x.shape[1:]), found)

    def _by_lane[T](self, function: Callable[..., T]) -> Callable[..., T]:
        """For arrays whose first axis goes over lanes: left alone, XLA lets them exchange all of their logits."""
        lanes = PartitionSpec(LANES)
        return jax.shard_map(function, mesh=self.mesh, in_specs=lanes, out_specs=lanes, check_vma=False)

    def _logits(self, params: dict, hidden: jax.Array) -> jax.Array:
        """Whole rows of the vocabulary on every shard: what samples reads all of it.

        Each shard's part first: without being told, XLA:TPU gathered the head's weight instead of the logits.
        """
        values = logits(params, self.spec, hidden)
        for axes in ((LANES, "tensor"), (LANES, None)):
            values = lax.with_sharding_constraint(values, NamedSharding(self.mesh, PartitionSpec(*axes)))
        return values

    def _scores(self, params: dict, hidden: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
        """Log-probability of every token's target, the head running over slices of tokens."""
        lanes, tokens, width = hidden.shape
        step = min(SCORE_TOKENS, tokens)
        slices = -(-tokens // step)
        padding = slices * step - tokens

        def score(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            hidden, targets = part
            values = self._logits(params, hidden.reshape(-1, width))
            found = self._by_lane(log_probabilities)(values, targets.reshape(-1))
            return jax.tree.map(lambda x: x.reshape(lanes, step, *x.shape[1:]), found)

        split_hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0))).reshape(lanes, slices, step, width)
        split_targets = jnp.pad(targets, ((0, 0), (0, padding))).reshape(lanes, slices, step)
        found = lax.map(score, (split_hidden.swapaxes(0, 1), split_targets.swapaxes(0, 1)))
        whole = [x.swapaxes(0, 1).reshape(lanes, slices * step, *x.shape[3:])[:, :tokens] for x in found]
        return dict(zip(("target_logprob", "target_top_ids", "target_top_logprobs"), whole, strict=True))


def _last(hidden: Float[Array, "A T D"], place: _Place) -> Float[Array, "A R D"]:
    """Of each chunk's last token."""
    return _take(hidden, jnp.maximum(place.starts[:, 1:] - 1, 0))


def _take(field: jax.Array, index: Int[Array, "A n"]) -> jax.Array:
    """[A, n, ...]: field[a, index[a, i]], lane for lane; ids out of range give any entry (padding)."""
    return jax.vmap(lambda lane, ids: lane.at[ids].get(mode="clip"))(field, index)


def _put(field: jax.Array, index: Int[Array, "A n"], value: jax.Array) -> jax.Array:
    """field[a, index[a, i]] = value[a, i], lane for lane; ids out of range are dropped (padding)."""
    return jax.vmap(lambda lane, ids, new: lane.at[ids].set(new, mode="drop"))(field, index, value)


def _add(field: jax.Array, index: Int[Array, "A n"], value: jax.Array) -> jax.Array:
    """field[a, index[a, i]] += value[a, i], lane for lane; ids out of range are dropped (padding)."""
    return jax.vmap(lambda lane, ids, more: lane.at[ids].add(more, mode="drop"))(field, index, value)


def _place_fresh_pages(rows: Rows, batch: Batch) -> Rows:
    def place(table: jax.Array, row: jax.Array, index: jax.Array, page: jax.Array) -> jax.Array:
        return table.at[row, index].set(page, mode="drop")

    tables = tuple(
        jax.vmap(place)(table, batch["fresh_row"][:, g], batch["fresh_index"][:, g], batch["fresh_page"][:, g])
        for g, table in enumerate(rows.tables)
    )
    return replace(rows, tables=tables)


def _locate(rows: Rows, batch: Batch, tokens: int) -> _Place:
    sizes = batch["sizes"]
    lengths = jnp.where(sizes > 0, _take(rows.length, batch["rows"]), 0) + sizes
    starts = jnp.pad(jnp.cumsum(sizes, axis=-1), ((0, 0), (1, 0)))
    index = jnp.arange(tokens)
    chunk = jax.vmap(lambda s: jnp.searchsorted(s, index, side="right") - 1)(starts)
    chunk = jnp.minimum(chunk, lengths.shape[-1] - 1)
    live = index[None] < starts[:, -1:]
    position = _take(lengths, chunk) - _take(starts[:, 1:], chunk) + index[None]
    split = jnp.stack([(sizes == 1).sum(-1), (sizes > 0).sum(-1)], axis=-1).astype(jnp.int32)
    return _Place(lengths, starts, split, chunk, jnp.where(live, position, 0), live)


def _slots(bucket: Bucket, batch: Batch, tokens: Int[Array, "A T"], place: _Place, vocab: int) -> _Slots:
    samples, slot = batch["samples"][..., None], jnp.arange(1 + bucket.drafts)[None, None]
    behind = jnp.maximum(samples, 1) - slot  # the chunk's end, in tokens
    token = jnp.maximum(place.starts[:, 1:, None] - behind, 0)
    lanes = token.shape[0]
    following = _take(tokens, (token + 1).reshape(lanes, -1)).reshape(token.shape)
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
    """How many of a row's sampled tokens count: up to the first that is not what was drafted, or is not finite."""
    right = (sampled.tokens == slots.drafted) & sampled.finite
    return jnp.where(slots.live[..., 0], 1 + jnp.cumprod(right, axis=-1).sum(-1), 0)


def _newest(field: Shaped[Array, "A R S"], taken: Int[Array, "A R"]) -> Shaped[Array, "A R"]:
    return jnp.take_along_axis(field, jnp.maximum(taken - 1, 0)[..., None], axis=-1)[..., 0]


def _advance(
    rows: Rows, batch: Batch, place: _Place, slots: _Slots, sampled: Sampled, taken: Int[Array, "A R"]
) -> Rows:
    """Rows after the step: longer, with their new tokens, and counted for penalties."""
    ids, live = batch["rows"], slots.live[..., 0]
    token = jnp.where(live, _newest(sampled.tokens, taken), _take(rows.token, ids))
    new = jnp.arange(slots.live.shape[-1])[None, None] < taken[..., None]
    counted = 2 * (new & (_take(rows.sampling.penalised, ids) == 1)[..., None]).astype(jnp.int32)
    counts = jax.vmap(lambda lane, row, token, n: lane.at[row[:, None], token].add(n, mode="drop"))(
        rows.fields.counts, ids, sampled.tokens, counted
    )
    return replace(
        rows,
        length=_put(rows.length, ids, place.lengths - jnp.where(live, batch["samples"] - taken, 0)),
        token=_put(rows.token, ids, token),
        fields=replace(rows.fields, counts=counts),
    )


def _ended(
    rows: Rows, ids: Int[Array, "A R"], tokens: Int[Array, "A R"], position: Int[Array, "A R"]
) -> Bool[Array, "A R"]:
    """Whether a row's new token, at this position, ends it: as the scheduler decides it."""
    ends = (tokens[..., None] == _take(rows.sampling.end_ids, ids)).any(-1)
    return ends & (position >= _take(rows.sampling.end_after, ids))


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
        **{f.name: getattr(rows.sampling, f.name).at[at].set(values[f.name]) for f in fields(RowSampling)}
    )
    tables = tuple(table.at[at].set(values["table"][g]) for g, table in enumerate(rows.tables))
    length = rows.length.at[at].set(values["length"])
    return replace(state, rows=replace(rows, sampling=sampling, tables=tables, length=length))


def set_counts(state: State, at: Int[Array, "2"], counts: Int[Array, "V"]) -> State:
    return _set_fields(state, at, counts=counts)


def set_bias(state: State, at: Int[Array, "2"], ids: Int[Array, "1024"], values: jax.Array) -> State:
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
