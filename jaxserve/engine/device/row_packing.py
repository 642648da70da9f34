"""Packing of what the host sends to the row writers: small fields, token counts, and masks."""

from collections.abc import Sequence

import numpy as np

from jaxserve.engine.device.packed import Packed, padded
from jaxserve.engine.device.sampling import SMALL_FIELDS
from jaxserve.engine.plan import Admission

MASKED_AT_ONCE = 8  # rows whose masks are written by one launch

Masks = tuple[np.ndarray, np.ndarray]


def admission_layout(groups: int, pages_per_row: int) -> Packed:
    """Return the layout of pack_admission's array."""
    return Packed(
        (
            ("lane", (), np.int32),
            ("row", (), np.int32),
            ("length", (), np.int32),
            ("table", (groups, pages_per_row), np.int32),
            ("fields", (SMALL_FIELDS.size,), np.int32),
        )
    )


def pack_admission(admission: Admission, pages_per_row: int) -> np.ndarray:
    """Pack the small fields of a row, with the lane and row that they are for, as [n] int32."""
    where = np.array([admission.lane, admission.row, admission.length], np.int32)
    # Page tables hold pages that exist, so an entry without a page (NO_PAGE) becomes page 0.
    tables = [
        padded([max(page, 0) for page in pages], pages_per_row, 0) for pages in admission.tables
    ]
    return np.concatenate([where, *tables, np.frombuffer(admission.packed, "<i4")])


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

    Args:
        entries: Lane, row, and the masks of its slots in order.

    Returns:
        Lanes and rows, [width, 2] int32, and masks, [width, slots, words] uint32.
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
