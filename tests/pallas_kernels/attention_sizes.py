"""Strategies for the number of tokens of a case's rows, with a preference for borders."""

from collections.abc import Sequence

from hypothesis import strategies as st

from tests.pallas_kernels.attention_case import ROWS, TOKENS, Shape


def contract_order(new: Sequence[int]) -> list[int]:
    """Return chunk sizes in the contract's order: single tokens, longer chunks, none."""
    return sorted(new, key=lambda size: (size == 0, size != 1))


def border_lengths(shape: Shape) -> st.SearchStrategy[list[int]]:
    """Draw lengths around the borders of pages, of blocks of 64 and of the table, and 0."""
    borders = [
        n + d
        for n in (0, shape.page_size, 2 * shape.page_size, 64, 128, shape.context)
        for d in (-1, 0, 1)
    ]
    fitting = sorted({n for n in borders if 0 <= n <= shape.context})
    return st.lists(st.sampled_from(fitting), min_size=ROWS, max_size=ROWS)


@st.composite
def decodes(draw: st.DrawFn, shape: Shape) -> tuple[list[int], list[int]]:
    """Draw cached and new tokens per row: one new token in each row that is not empty."""
    lengths = sorted(draw(border_lengths(shape)), key=lambda length: length == 0)
    return [max(n - 1, 0) for n in lengths], [min(n, 1) for n in lengths]


@st.composite
def chunks(draw: st.DrawFn, shape: Shape) -> tuple[list[int], list[int]]:
    """Draw cached and new tokens per row.

    Rows are prompts from the start, continuations, drafts, decodes and empty rows.
    """
    new = []
    left = TOKENS
    for _ in range(ROWS):
        size = min(
            draw(st.sampled_from([0, 0, 1, 1, 2, 5, 31, 32, 33, 50, 70])), left, shape.context
        )
        new.append(size)
        left -= size
    new = contract_order(new)
    lengths = draw(border_lengths(shape))
    return [max(length - size, 0) for length, size in zip(lengths, new, strict=True)], new
