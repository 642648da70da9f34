"""Packed int32 arrays: one upload and one download per step, laid out in one place for host and
device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.events import Logprob
from jaxserve.engine.plan import Admission, LaneOutput, LanePlan
from jaxserve.request import MAX_EOS_IDS, MAX_LOGPROBS, MAX_STOP_TOKENS

MAX_END_IDS = MAX_STOP_TOKENS + MAX_EOS_IDS
MASKED_AT_ONCE = 8  # rows whose masks are written by one launch

Masks = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Packed:
    """Named fields one after the other in the last axis of an int32 array; floats and uint32 travel
    as their bits.
    """

    fields: tuple[tuple[str, tuple[int, ...], type], ...]

    @property
    def size(self) -> int:
        return sum(prod(shape) for _, shape, _ in self.fields)

    def pack(self, values: Mapping[str, Any]) -> np.ndarray:
        """[size] int32 on the host."""
        parts = [
            np.asarray(values[name], dtype).reshape(-1).view(np.int32)
            for name, _, dtype in self.fields
        ]
        return np.concatenate(parts)

    def pack_on_device(self, values: Mapping[str, jax.Array]) -> jax.Array:
        """[*lead, size] int32 from fields of shape [*lead, *shape]."""
        parts = []
        for name, shape, dtype in self.fields:
            value = values[name].astype(dtype)
            value = value if dtype is np.int32 else lax.bitcast_convert_type(value, jnp.int32)
            lead = value.shape[: value.ndim - len(shape)]
            parts.append(value.reshape(*lead, prod(shape)))
        return jnp.concatenate(parts, axis=-1)

    def unpack(self, array: jax.Array) -> dict[str, jax.Array]:
        """Fields of shape [*lead, *shape] from [*lead, size], on the device."""
        values, at = {}, 0
        for name, shape, dtype in self.fields:
            part = array[..., at : at + prod(shape)].reshape(*array.shape[:-1], *shape)
            values[name] = part if dtype is np.int32 else lax.bitcast_convert_type(part, dtype)
            at += prod(shape)
        return values

    def unpack_on_host(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Views of one lane's [size] array."""
        values, at = {}, 0
        for name, shape, dtype in self.fields:
            values[name] = array[at : at + prod(shape)].view(dtype).reshape(shape)
            at += prod(shape)
        return values


# ---- the upload


def upload_layout(bucket: Bucket, page_groups: int, page_size: int) -> Packed:
    """rows: state row per chunk, out of range for padding. fresh_*: new entries of page tables, per
    page group.

    starts: of draft steps, whose rows are longer than the draft model has them.
    """
    fresh = (page_groups, bucket.fresh_pages(page_size))
    fields: list[tuple[str, tuple[int, ...], type]] = [
        ("rows", (bucket.rows,), np.int32),
        ("sizes", (bucket.rows,), np.int32),
        ("samples", (bucket.rows,), np.int32),
        ("fresh_row", fresh, np.int32),
        ("fresh_index", fresh, np.int32),
        ("fresh_page", fresh, np.int32),
    ]
    if bucket.kind != "decode":
        fields.append(("tokens", (bucket.tokens,), np.int32))
    if bucket.kind == "score":
        fields.append(("targets", (bucket.tokens,), np.int32))
    if bucket.kind == "draft":
        fields.append(("starts", (bucket.rows,), np.int32))
    return Packed(tuple(fields))


def pack_lane(
    plan: LanePlan, bucket: Bucket, layout: Packed, *, page_size: int, page_groups: int, no_row: int
) -> np.ndarray:
    """One lane's columns, padded to the bucket. no_row: a row id that is out of range, for
    padding."""
    fresh_row = np.full((page_groups, bucket.fresh_pages(page_size)), no_row, np.int32)
    fresh_index, fresh_page = np.zeros_like(fresh_row), np.zeros_like(fresh_row)
    counts = [0] * page_groups
    for group, row, index, page in plan.fresh:
        at = counts[group]
        fresh_row[group, at], fresh_index[group, at], fresh_page[group, at] = row, index, page
        counts[group] += 1
    values = {
        "rows": _padded(plan.rows, bucket.rows, no_row),
        "sizes": _padded(plan.sizes, bucket.rows, 0),
        "samples": _padded(plan.samples, bucket.rows, 0),
        "fresh_row": fresh_row,
        "fresh_index": fresh_index,
        "fresh_page": fresh_page,
    }
    if bucket.kind != "decode":
        values["tokens"] = _padded(plan.tokens, bucket.tokens, 0)
    if bucket.kind == "score":
        values["targets"] = _padded(plan.targets, bucket.tokens, 0)
    if bucket.kind == "draft":
        values["starts"] = _padded(plan.starts, bucket.rows, 0)
    return layout.pack(values)


def _padded(column: list[int], size: int, fill: int) -> np.ndarray:
    padded = np.full(size, fill, np.int32)
    padded[: len(column)] = column
    return padded


# ---- the download


def download_layout(bucket: Bucket, width: int = 0) -> Packed:
    """Per chunk: tokens (n_new of them count), finite, log-probabilities; score steps: the same of
    every target.

    Embed steps: per chunk an embedding of `width` numbers, and finite. Draft steps: finite.
    """
    rows, most, top = bucket.rows, bucket.max_row_results, MAX_LOGPROBS
    if bucket.kind == "draft":
        return Packed((("finite", (rows,), np.int32),))
    if bucket.kind == "embed":
        return Packed((("finite", (rows,), np.int32), ("embedding", (rows, width), np.float32)))
    fields: list[tuple[str, tuple[int, ...], type]] = [
        ("n_new", (rows,), np.int32),
        ("tokens", (rows, most), np.int32),
        ("finite", (rows,), np.int32),
        ("logprob", (rows, most), np.float32),
        ("top_ids", (rows, most, top), np.int32),
        ("top_logprobs", (rows, most, top), np.float32),
    ]
    if bucket.kind == "score":
        fields += [
            ("target_logprob", (bucket.tokens,), np.float32),
            ("target_top_ids", (bucket.tokens, top), np.int32),
            ("target_top_logprobs", (bucket.tokens, top), np.float32),
        ]
    return Packed(tuple(fields))


def unpack_lane(plan: LanePlan, layout: Packed, array: np.ndarray) -> LaneOutput:
    """What one lane's [size] array says of the plan's chunks."""
    out = layout.unpack_on_host(array)
    chunks = range(len(plan.rows))
    finite = [bool(flag) for flag in out["finite"][: len(plan.rows)].tolist()]
    if "embedding" in out:
        return LaneOutput(
            [[] for _ in chunks], finite, embeddings=out["embedding"][: len(plan.rows)].tolist()
        )
    if "tokens" not in out:
        return LaneOutput([[] for _ in chunks], finite)
    n_new, tokens = out["n_new"].tolist(), out["tokens"].tolist()
    result = LaneOutput([tokens[i][: n_new[i]] for i in chunks], finite)
    if plan.logprobs:
        columns = out["logprob"].tolist(), out["top_ids"].tolist(), out["top_logprobs"].tolist()
        result.logprobs = [
            [
                _logprob(tokens[i][n], columns[0][i][n], columns[1][i][n], columns[2][i][n])
                for n in range(n_new[i])
            ]
            for i in chunks
        ]
    if "target_logprob" in out:
        columns = (
            out["target_logprob"].tolist(),
            out["target_top_ids"].tolist(),
            out["target_top_logprobs"].tolist(),
        )
        result.prompt_logprobs = [
            _logprob(*entry) for entry in zip(plan.targets, *columns, strict=False)
        ]
    return result


def _logprob(token: int, logprob: float, top_ids: list[int], top_logprobs: list[float]) -> Logprob:
    return Logprob(token, logprob, tuple(zip(top_ids, top_logprobs, strict=True)))


# ---- admissions


def admission_layout(page_groups: int, pages_per_row: int) -> Packed:
    """The small fields of a row, with where they go."""
    one = ()
    return Packed(
        (
            ("lane", one, np.int32),
            ("row", one, np.int32),
            ("length", one, np.int32),
            ("table", (page_groups, pages_per_row), np.int32),
            ("key", (2,), np.uint32),
            ("choice", one, np.int32),
            ("temperature", one, np.float32),
            ("top_k", one, np.int32),
            ("top_p", one, np.float32),
            ("min_p", one, np.float32),
            ("repetition", one, np.float32),
            ("presence", one, np.float32),
            ("frequency", one, np.float32),
            ("logprobs", one, np.int32),
            ("end_after", one, np.int32),
            ("end_ids", (MAX_END_IDS,), np.int32),
            ("biased", one, np.int32),
            ("masked", one, np.int32),
            ("penalised", one, np.int32),
        )
    )


def pack_admission(
    admission: Admission, layout: Packed, pages_per_row: int, vocab_size: int
) -> np.ndarray:
    a = admission
    return layout.pack(
        {
            "lane": a.lane,
            "row": a.row,
            "length": a.length,
            "table": [
                _padded([max(page, 0) for page in pages], pages_per_row, 0) for pages in a.tables
            ],  # not NO_PAGE
            "key": np.array([a.seed >> 32, a.seed & 0xFFFFFFFF], np.uint32),
            "choice": a.choice,
            "temperature": a.temperature,
            "top_k": a.top_k,
            "top_p": a.top_p,
            "min_p": a.min_p,
            "repetition": a.repetition_penalty,
            "presence": a.presence_penalty,
            "frequency": a.frequency_penalty,
            "logprobs": a.logprobs,
            "end_after": a.prompt_tokens + a.min_tokens,
            "end_ids": _padded(list(a.end_ids), MAX_END_IDS, vocab_size),
            "biased": len(a.bias) > 0,
            "masked": a.masked,
            "penalised": a.history is not None,
        }
    )


def token_counts(admission: Admission, vocab_size: int) -> np.ndarray:
    """[V] int32: bit 0 says that the prompt has the token, the rest counts it in the output."""
    history = np.asarray(admission.history, np.int64)
    counts = 2 * np.bincount(history[admission.prompt_tokens :], minlength=vocab_size)
    counts[history[: admission.prompt_tokens]] |= 1
    return counts.astype(np.int32)


def pack_masks(
    entries: Sequence[tuple[int, int, bytes]], width: int, slots: int, words: int, no_row: int
) -> Masks:
    """[width, 2] int32 of lane and row, and [width, slots, words] uint32: what each row may sample
    at each slot.

    entries: lane, row, masks of its slots, in order; what is missing is padding, to rows and to
    slots.
    """
    at, masks = np.full((width, 2), no_row, np.int32), np.zeros((width, slots, words), np.uint32)
    for i, (lane, row, mask) in enumerate(entries):
        at[i] = lane, row
        given = np.frombuffer(mask, "<u4").reshape(-1, words)
        masks[i, : len(given)] = given
    return at, masks


def allowed_bits(allowed: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """[ceil(V/32)] uint32, bit v % 32 of word v // 32 set for an allowed token."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")
