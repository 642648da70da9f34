"""Checks that every Pallas kernel of paged attention must pass, beside its own shapes' cases."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.paged_attention.api import (
    Layout,
    Options,
    PagedAttention,
    Pages,
    Ragged,
)
from tests.pallas_kernels.attention_case import ROWS, Case, Shape


def decode_cases(attention: PagedAttention, shape: Shape) -> list[Case]:
    """Draw decode steps.

    Rows begin, end a page, begin a page, or fill the table; a step may have no row, or one that
    ended before.
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
    """Draw steps with chunks.

    Rows are prompts from the start, continuations over borders of pages, verified drafts and single
    tokens; a step may have no row.
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
    """Check that a row's result has the same bits in any slot and any pages.

    Its neighbours are longer, shorter or NaN.
    """
    found = set()
    for order, (before, poisoned) in enumerate(
        (([99, 7, 0], []), ([7, 99, 120], [2]), ([1, 20, 99], [0, 1]))
    ):
        at = before.index(99)
        seeds = [1234 if row == at else 10 * order + row for row in range(ROWS)]
        case = Case(attention, shape, [*before, 0, 0], [1, 1, 1, 0, 0], seeds, order, poisoned)
        found.add(case.run_decode()[0][at].tobytes())
    assert len(found) == 1


def check_that_no_neighbour_changes_a_bit(attention: PagedAttention, shape: Shape) -> None:
    """Check that a row's result has the same bits in any slot, packing offset and pages.

    Its neighbours are longer, shorter, empty or NaN.
    """
    mine = 1234
    cached = shape.context - 37
    new = 37
    decoded = set()
    prefilled = set()
    for order, others in ((1, [0, 0, 0, 0]), (2, [9, 7, 1, 0]), (3, [shape.context] * 4)):
        for poison in (False, True):
            # Rows as (seed, new, cached), mine among them where its size puts it.
            rows = [(100 * order + row, min(n, 10), n - min(n, 10)) for row, n in enumerate(others)]
            for many in (True, False):
                size = new if many else 1
                every = [(seed, n if many else min(n, 1), before) for seed, n, before in rows]
                every.insert(order, (mine, size, cached + new - size))
                every = sorted(every, key=lambda row: (row[1] == 0, row[1] != 1))
                seeds, sizes, before = (list(column) for column in zip(*every, strict=True))
                at = seeds.index(mine)
                poisoned = [row for row in range(ROWS) if row != at] if poison else []
                case = Case(attention, shape, before, sizes, seeds, order, poisoned)
                if many:
                    prefilled.add(case.run_prefill()[0][at].tobytes())
                else:
                    decoded.add(case.run_decode()[0][at].tobytes())
    assert len(decoded) == len(prefilled) == 1


def check_tiles_of_few_tokens(
    attention: PagedAttention, shape: Shape, max_row_tokens: int, tolerance: float
) -> None:
    """Check that verified drafts of up to max_row_tokens tokens equal any other chunk."""
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
    """Check that NaN shows in the result of the row that has it, and in no other."""
    case = Case(attention, shape, cached=[40, 3, 0, 0, 0], new=[1, 1, 0, 0, 0], poisoned=[0])
    out, lse = case.run_decode()
    assert np.isnan(out[0]).all() and np.isnan(lse[0]).all() and np.isfinite(out[1]).all()


def check_that_lse_is_for_those_who_ask(attention: PagedAttention, shape: Shape) -> None:
    """Check that a step without lse returns none, and the same result."""
    case = Case(attention, shape, cached=[40, 3, 0, 0, 0], new=[1, 1, 0, 0, 0])
    options = replace(shape.options(decode=True), lse=False)
    asked = case.run(ROWS, decode=True)
    plain = case.run(ROWS, decode=True, options=options)
    assert asked.lse is not None and plain.lse is None
    np.testing.assert_array_equal(asked.out, plain.out)


def check_a_context_of_128k_tokens(attention: PagedAttention) -> None:
    """Check that positions beyond 16 bits are right.

    The last tokens are those of a row that only just fits, and of one behind a window.
    """
    length = 2**17
    most = 2**11
    layout = Layout(1, 8, 256, jnp.dtype(np.float32))
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, length, 1, 8)).astype(np.float32)
    q = rng.normal(size=(1, 1, 8)).astype(np.float32)
    pages = Pages(*(jnp.asarray(x.reshape(-1, 1, 256, 8)) for x in (k, v)))
    ids = jnp.arange(length // 256, dtype=jnp.int32)
    ragged = Ragged(
        ids[None],
        jnp.array([length]),
        jnp.array([0, 1]),
        jnp.array([1, 1]),
        ids[-1:],
        jnp.array([255]),
    )
    for window in (None, most):
        options = Options(layout, 1.0, window, max_row_tokens=1)
        out = attention.attend(q, k[-1:], v[-1:], pages, ragged, options).out
        first = 0 if window is None else length - most
        weights = np.exp(np.float64(q[0] @ k[first:, 0].T))[0]
        np.testing.assert_allclose(out[0, 0], weights @ v[first:, 0] / weights.sum(), atol=1e-5)
