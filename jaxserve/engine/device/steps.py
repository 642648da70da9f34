"""The compiled steps: pure functions of parameters, state and one packed upload.

A step goes from the upload to the layout of its tokens, through the decoder, to the logits of the
rows that sample, to their tokens, and ends with the new state and one packed download. An embed
step has embeddings in place of logits and tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.batch import download_layout, upload_layout
from jaxserve.engine.device.drafting import Drafter, ModelPass, draft_tokens, fill_in_drafts
from jaxserve.engine.device.lane_index import put, take
from jaxserve.engine.device.logprobs import log_probabilities
from jaxserve.engine.device.sample_slots import (
    Batch,
    SampleSlots,
    accepted_tokens,
    advance,
    ended,
    newest,
    sample_slots,
    sampled_results,
)
from jaxserve.engine.device.sampling import (
    Sampled,
    disable_idle_rows,
    sample,
    take_rows,
    unpack_sampling,
)
from jaxserve.engine.device.sharded_model import ShardedModel, by_lane
from jaxserve.engine.device.state import Rows, State
from jaxserve.engine.device.token_layout import TokenLayout, last_of_chunks
from jaxserve.engine.plan import FED_BACK
from jaxserve.models.decoder import embeddings, settled
from jaxserve.models.spec import ModelSpec

# Tokens that score steps give the head at a time, so that no [T, V] array exists.
SCORE_TOKENS = 64


@dataclass(frozen=True)
class StepBuilder:
    """Builder of an engine's steps: `step(bucket)` gives the function to compile."""

    model: ShardedModel
    drafter: Drafter | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @cached_property
    def _sampler(self) -> Callable[..., Sampled]:
        """The sampler of every lane, which steps with the same number of slots trace once."""
        return jax.jit(by_lane(self.model.mesh, sample))

    def step(self, bucket: Bucket) -> Callable[[dict, State, jax.Array], tuple[State, jax.Array]]:
        """Return the step of this shape: (params, state, upload) -> (state, download)."""
        groups = self.spec.num_groups
        upload = upload_layout(bucket, groups, self.model.page_size)
        download = download_layout(bucket, self.spec.d_model)

        def run(
            params: dict, state: State, packed: Int[Array, "A n"]
        ) -> tuple[State, Int[Array, "A m"]]:
            params = self.model.bind_kernels(params)
            batch = upload.unpack(packed)
            # Before anything else: the step's tokens are written into these pages.
            state = replace(state, rows=_add_fresh_pages(state.rows, batch))
            if bucket.kind == "draft":
                state, results = self._catch_up(bucket, params, state, batch)
            elif bucket.steps > 1:
                state, results = self._several_decodes(bucket, params, state, batch)
            else:
                begin = take(state.rows.length, batch["rows"])
                layout = TokenLayout.of_chunks(begin, batch["sizes"], bucket.tokens)
                if bucket.kind == "verify" and self.drafter:
                    state, batch = self._draft(self.drafter, bucket, params, state, batch, layout)
                state, results = self._compute(bucket, params, state, batch, layout)
            return state, download.pack_on_device(results)

        return run

    def _compute(
        self, bucket: Bucket, params: dict, state: State, batch: Batch, layout: TokenLayout
    ) -> tuple[State, Batch]:
        """Run the batch's tokens through the model; return the new state and the step's results."""
        rows = state.rows
        tokens = self._tokens(rows, batch, layout)
        tables = tuple(take(table, batch["rows"]) for table in rows.tables)
        done = self.model.forward(
            *(params, state.kept, tables, tokens, layout, bucket.max_row_tokens),
            verifies=bucket.kind == "verify",
        )
        per_lane = done.hidden.reshape(*tokens.shape, -1)
        load = None if state.load is None else state.load + jnp.asarray(done.load, jnp.uint32)
        if bucket.kind == "embed":
            rows, results = self._embed(params, rows, batch, per_lane, layout)
            kept = settled(done.written, batch["sizes"])
            return replace(state, kept=kept, load=load, rows=rows), results
        slots = sample_slots(bucket, batch, tokens, layout, self.spec.vocab_size)
        sampled = self._sample(params, rows, batch, per_lane, slots)
        accepted = accepted_tokens(slots, sampled)
        kept = settled(done.written, batch["sizes"] - batch["samples"] + accepted)
        state = replace(state, kept=kept, load=load)
        if self.drafter:
            model = ModelPass(
                ids=batch["rows"],
                tokens=tokens,
                hidden=per_lane,
                layout=layout,
                samples=slots.live[..., 0],
                newest=newest(slots.token, accepted),
            )
            state = replace(state, drafter=self.drafter.observe(params, state, model))
        results = sampled_results(sampled, accepted)
        if bucket.kind == "score":
            results |= self._scores(params, per_lane, batch["targets"])
        rows = advance(rows, batch, layout, slots, sampled, accepted)
        return replace(state, rows=rows), results

    def _draft(
        self,
        drafter: Drafter,
        bucket: Bucket,
        params: dict,
        state: State,
        batch: Batch,
        layout: TokenLayout,
    ) -> tuple[State, Batch]:
        """Draft the tokens to be verified; return the new state and the batch with them."""
        vocab = self.spec.vocab_size
        state, drafted = draft_tokens(
            drafter, self.model.mesh, params, state, batch, bucket.drafts, vocab
        )
        return state, batch | {"tokens": fill_in_drafts(batch["tokens"], drafted, layout)}

    def _catch_up(
        self, bucket: Bucket, params: dict, state: State, batch: Batch
    ) -> tuple[State, Batch]:
        """Run known tokens that the draft model's pages lack through the draft model alone."""
        assert self.drafter
        layout = TokenLayout.of_chunks(batch["starts"], batch["sizes"], bucket.tokens)
        kept, hidden = self.drafter.catch_up(params, state, batch["rows"], batch["tokens"], layout)
        finite = jnp.isfinite(last_of_chunks(hidden, layout)).all(-1)
        return replace(state, drafter=kept), {"finite": finite}

    def _embed(
        self,
        params: dict,
        rows: Rows,
        batch: Batch,
        hidden: Float[Array, "A T D"],
        layout: TokenLayout,
    ) -> tuple[Rows, Batch]:
        """Embed every row as if its prompt ended with the chunk; return new rows and results.

        The host uses the embedding of the chunk that does end the prompt.
        """
        ends = last_of_chunks(hidden, layout)
        found = embeddings(params, self.spec, ends.reshape(-1, self.spec.d_model))
        found = found.reshape(ends.shape)
        rows = replace(rows, length=put(rows.length, layout.lengths, batch["rows"]))
        return rows, {"embedding": found, "finite": jnp.isfinite(found).all(-1)}

    def _several_decodes(
        self, bucket: Bucket, params: dict, state: State, batch: Batch
    ) -> tuple[State, Batch]:
        """Run `bucket.steps` decodes, each feeding the next, at most batch["sizes"] of each row.

        The scan has a fixed length: outside a CUDA graph, a loop with a condition asks the host
        before every turn. A row that is done takes part at its last position, but writes nothing
        and reports nothing.
        """
        ids = batch["rows"]
        sizes = batch["sizes"]

        def decode(
            carry: tuple[State, jax.Array], step: jax.Array
        ) -> tuple[tuple[State, jax.Array], Batch]:
            state, going = carry
            going = going & (step < sizes)
            # Rows that are done keep size 1, because a size of 0 would shift the packing. They
            # begin one position earlier, so that their length does not change.
            begin = take(state.rows.length, ids) - jnp.where(going, 0, 1)
            one_each = batch | {
                "sizes": (sizes > 0).astype(jnp.int32),
                "samples": going.astype(jnp.int32),
            }
            layout = TokenLayout.of_chunks(begin, one_each["sizes"], bucket.tokens)
            # With one token per row, token t is row t's.
            layout = layout._replace(live=layout.live & going)
            state, found = self._compute(bucket, params, state, one_each, layout)
            finite = found["finite"]
            done = ended(state.rows, ids, found["tokens"][..., 0], layout.lengths) | ~finite
            # A row that is done computes again what it has reported: that is no second failure.
            return (state, going & ~done), found | {"finite": finite | ~going}

        (state, _), found = lax.scan(decode, (state, sizes > 0), jnp.arange(bucket.steps))
        # Fields of rows are [K, A, R]; fields of tokens, [K, A, R, 1, ...], become [A, R, K, ...].
        per_row = {"n_new": found["n_new"].sum(0), "finite": found["finite"].all(0)}
        per_token = {
            name: jnp.moveaxis(x[:, :, :, 0], 0, 2)
            for name, x in found.items()
            if name not in per_row
        }
        return state, per_row | per_token

    def _tokens(self, rows: Rows, batch: Batch, layout: TokenLayout) -> Int[Array, "A T"]:
        """Return the uploaded tokens, with each row's newest one where the host lacks it."""
        on_device = take(rows.token, batch["rows"])
        if "tokens" not in batch:  # decode: one token per row
            return on_device
        fed_back = take(on_device, layout.chunk)
        return jnp.where(batch["tokens"] == FED_BACK, fed_back, batch["tokens"])

    def _sample(
        self, params: dict, rows: Rows, batch: Batch, hidden: jax.Array, slots: SampleSlots
    ) -> Sampled:
        """Sample a token in each slot; fields [A, R, S, ...]."""
        lanes, count, width = slots.live.shape
        states = take(hidden, slots.token.reshape(lanes, -1))
        values = self.model.logits(params, states.reshape(-1, states.shape[-1]))
        ids = jnp.repeat(batch["rows"], width, axis=-1)
        sampling = unpack_sampling(take_rows(rows.sampling, ids))
        sampling = disable_idle_rows(sampling, ~slots.live.reshape(-1))
        # jaxlib 0.11.2 crashes when it compiles a shard_map over an array without elements.
        before = slots.before.reshape(lanes * count * width, -1) if width > 1 else None
        found = self._sampler(
            values, sampling, rows.fields, ids, slots.position.reshape(-1), before
        )
        return jax.tree.map(lambda x: x.reshape(lanes, count, width, *x.shape[1:]), found)

    def _scores(self, params: dict, hidden: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
        """Compute the log-probability of every token's target, slice by slice of tokens."""
        lanes, tokens, width = hidden.shape
        step = min(SCORE_TOKENS, tokens)
        slices = -(-tokens // step)
        padding = slices * step - tokens

        def score(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            hidden, targets = part
            values = self.model.logits(params, hidden.reshape(-1, width))
            found = by_lane(self.model.mesh, log_probabilities)(values, targets.reshape(-1))
            return jax.tree.map(lambda x: x.reshape(lanes, step, *x.shape[1:]), found)

        padded_hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
        split_hidden = padded_hidden.reshape(lanes, slices, step, width)
        split_targets = jnp.pad(targets, ((0, 0), (0, padding))).reshape(lanes, slices, step)
        found = lax.map(score, (split_hidden.swapaxes(0, 1), split_targets.swapaxes(0, 1)))
        whole = [
            x.swapaxes(0, 1).reshape(lanes, slices * step, *x.shape[3:])[:, :tokens] for x in found
        ]
        names = ("target_logprob", "target_top_ids", "target_top_logprobs")
        return dict(zip(names, whole, strict=True))


def _add_fresh_pages(rows: Rows, batch: Batch) -> Rows:
    """Enter the pages that the host allocated for this step into the rows' tables."""
    page, row, index = (batch[name] for name in ("fresh_page", "fresh_row", "fresh_index"))
    tables = tuple(
        put(table, page[:, g], row[:, g], index[:, g]) for g, table in enumerate(rows.tables)
    )
    return replace(rows, tables=tables)
