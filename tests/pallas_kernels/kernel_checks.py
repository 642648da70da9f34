"""What every Pallas kernel of paged attention is put to, beside the cases of its own shapes."""

from dataclasses import replace

import numpy as np

from pallas_kernels.paged_attention.api import PagedAttention
from tests.pallas_kernels.attention_case import ROWS, Case, Shape


def decode_cases(attention: PagedAttention, shape: Shape) -> list[Case]:
    """Rows that begin, that end a page, that begin one, that fill the table; none at all; one that
    was done.
    """
    page = shape.page_size
    whole = shape.context
    return [
        Case(attention, shape, [0, page - 1, page, whole - 1, 0], [1, 1, 1, 1, 0], order=1),
        Case(
            attention,
            shape,
            [page - 2, 2 * page - 1, whole - page, whole - 2, 63],
            [1] * ROWS,
            order=2,
            poisoned=[1],
        ),
        Case(attention, shape, [whole // 2, 0, 0, 0, 0], [1, 0, 0, 0, 0], order=3),
        Case(attention, shape, [37, 5, whole - 9, 0, 0], [1, 1, 1, 0, 0], order=4, done=[1]),
    ]


def chunk_cases(attention: PagedAttention, shape: Shape) -> list[Case]:
    """Prompts from the start, continuations over borders of pages, verified drafts, single tokens;
    none at all.
    """
    page = shape.page_size
    whole = shape.context
    return [
        Case(
            attention, shape, [whole - 1, 0, page - 1, whole - 20, 0], [1, 33, 17, 20, 0], order=1
        ),
        Case(
            attention,
            shape,
            [0, 40, page, whole - 5, page - 3],
            [1, 1, 31, 5, 6],
            order=2,
            poisoned=[3],
        ),
        Case(attention, shape, [whole - 70, 0, 0, 0, 0], [70, 0, 0, 0, 0], order=3),
        Case(attention, shape, [0, 0, 0, 0, 0], [0, 0, 0, 0, 0], order=4),
    ]


def check_that_neighbours_change_no_bit(attention: PagedAttention, shape: Shape) -> None:
    """In any slot, in any pages, beside rows that are longer, shorter or NaN."""
    found = set()
    for order, (before, poisoned) in enumerate(
        (([99, 7, 0], []), ([7, 99, 120], [2]), ([1, 20, 99], [0, 1]))
    ):
        at = before.index(99)
        seeds = [1234 if row == at else 10 * order + row for row in range(ROWS)]
        case = Case(attention, shape, [*before, 0, 0], [1, 1, 1, 0, 0], seeds, order, poisoned)
        found.add(case.decoded()[0][at].tobytes())
    assert len(found) == 1


def check_tiles_of_few_tokens(
    attention: PagedAttention, shape: Shape, max_row_tokens: int, tolerance: float
) -> None:
    """Verified drafts, of at max_row_tokens so many tokens, are attended to as any chunk is."""
    cached = [50, 13, 16, 90, 0]
    new = [1, max_row_tokens, max_row_tokens, max_row_tokens - 1, 0]
    wide = Case(attention, shape, cached, new, order=1).run(5 * max_row_tokens, decode=False).out
    narrow = (
        Case(attention, shape, cached, new, order=1)
        .run(5 * max_row_tokens, decode=False, max_row_tokens=max_row_tokens)
        .out
    )
    np.testing.assert_allclose(
        np.asarray(narrow, np.float32), np.asarray(wide, np.float32), atol=tolerance
    )


def check_that_nan_is_seen(attention: PagedAttention, shape: Shape) -> None:
    """By the row that has it, and by no other."""
    case = Case(attention, shape, cached=[40, 3, 0, 0, 0], new=[1, 1, 0, 0, 0], poisoned=[0])
    out, lse = case.decoded()
    assert np.isnan(out[0]).all() and np.isnan(lse[0]).all() and np.isfinite(out[1]).all()


def check_that_lse_is_for_those_who_ask(attention: PagedAttention, shape: Shape) -> None:
    case = Case(attention, shape, cached=[40, 3, 0, 0, 0], new=[1, 1, 0, 0, 0])
    options = replace(shape.options(decode=True), lse=False)
    asked = case.run(ROWS, decode=True)
    plain = case.run(ROWS, decode=True, options=options)
    assert asked.lse is not None and plain.lse is None
    np.testing.assert_array_equal(asked.out, plain.out)
