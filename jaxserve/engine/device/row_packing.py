"""Packing of what the host sends to the row writers: small fields, token counts, and masks."""

from collections.abc import Sequence

import numpy as np

from jaxserve.engine.device.packed import Packed, padded
from jaxserve.engine.plan import Admission
from jaxserve.request import MAX_EOS_IDS, MAX_STOP_TOKENS

MAX_END_IDS = MAX_STOP_TOKENS + MAX_EOS_IDS
MASKED_AT_ONCE = 8  # rows whose masks are written by one launch

Masks = tuple[np.ndarray, np.ndarray]


def admission_layout(page_groups: int, pages_per_row: int) -> Packed:
    """Return the layout of a row's small fields, with the lane and row that they are for."""
    one: tuple[int, ...] = ()  # the shape of a scalar
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
    """Pack the small fields of a row; missing end tokens are padded with vocab_size."""
    a = admission
    # Page tables hold pages that exist, so an entry without a page (NO_PAGE) becomes page 0.
    tables = [[max(page, 0) for page in pages] for pages in a.tables]
    return layout.pack(
        {
            "lane": a.lane,
            "row": a.row,
            "length": a.length,
            "table": [padded(table, pages_per_row, 0) for table in tables],
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
            "end_ids": padded(list(a.end_ids), MAX_END_IDS, vocab_size),
            "biased": len(a.bias) > 0,
            "masked": a.masked,
            "penalised": a.history is not None,
        }
    )


def token_counts(admission: Admission, vocab_size: int) -> np.ndarray:
    """Count tokens for penalties, [V] int32: bit 0 is set for tokens of the prompt.

    The other bits count a token's occurrences in the output.
    """
    history = np.asarray(admission.history, np.int64)
    counts = 2 * np.bincount(history[admission.prompt_tokens :], minlength=vocab_size)
    counts[history[: admission.prompt_tokens]] |= 1
    return counts.astype(np.int32)


def pack_masks(
    entries: Sequence[tuple[int, int, bytes]], width: int, slots: int, words: int, padding_row: int
) -> Masks:
    """Pack masks of allowed tokens, padded to `width` rows and to `slots` sampling slots each.

    entries: lane, row, and the masks of its slots in order. Returns [width, 2] int32 of lane and
    row, and [width, slots, words] uint32.
    """
    where = np.full((width, 2), padding_row, np.int32)
    masks = np.zeros((width, slots, words), np.uint32)
    for i, (lane, row, mask) in enumerate(entries):
        where[i] = lane, row
        given = np.frombuffer(mask, "<u4").reshape(-1, words)
        masks[i, : len(given)] = given
    return where, masks


def allowed_bits(allowed: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """Return a mask of allowed tokens, [ceil(V/32)] uint32: bit v % 32 of word v // 32 for v."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")
