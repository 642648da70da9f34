"""Paged attention in plain XLA against dense attention in numpy, float64, one head at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention.reference import Pages, allocate, decode, prefill, read, write, write_back

TOLERANCE = 1e-5  # scores of up to 20 carry float32's rounding into the exponent
TOKENS = 80  # of a prefill step; a tile has 32
ROWS = 5


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    width: int  # entries of a page table
    window: int | None = None
    softcap: float | None = None

    @property
    def context(self) -> int:
        return self.page_size * self.width

    @property
    def knobs(self) -> dict[str, float | None]:
        return dict(scale=self.head_dim**-0.5, window=self.window, softcap=self.softcap)

    def scores(self, products: np.ndarray) -> np.ndarray:
        scaled = products * self.head_dim**-0.5
        return scaled if self.softcap is None else self.softcap * np.tanh(scaled / self.softcap)

    def seen(self, queries: np.ndarray) -> np.ndarray:
        """[M, S]: which positions the queries see."""
        distance = queries[:, None] - np.arange(self.context)
        return (distance >= 0) & (distance < (self.window or self.context))


SHAPES = [
    Shape(heads=4, kv_heads=4, head_dim=8, page_size=1, width=70),
    Shape(heads=6, kv_heads=1, head_dim=80, page_size=3, width=31),
    Shape(heads=8, kv_heads=2, head_dim=16, page_size=16, width=9),
    Shape(heads=4, kv_heads=2, head_dim=64, page_size=64, width=2),
    Shape(heads=3, kv_heads=3, head_dim=128, page_size=100, width=2),
    Shape(heads=4, kv_heads=2, head_dim=16, page_size=4, width=50, window=1),
    Shape(heads=8, kv_heads=2, head_dim=16, page_size=8, width=25, window=64, softcap=2.0),
    Shape(heads=4, kv_heads=1, head_dim=32, page_size=16, width=14, window=75),
    Shape(heads=4, kv_heads=4, head_dim=8, page_size=32, width=4, softcap=1.5),
]
every_shape = pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda s: f"N{s.heads}K{s.kv_heads}Z{s.page_size}W{s.window}"
)
KNOBS = ("scale", "window", "softcap")
DECODE = jax.jit(decode, static_argnames=KNOBS)
PREFILL = jax.jit(prefill, static_argnames=KNOBS)


@dataclass
class Case:
    """Rows with `cached` tokens in pages before the step and `new` ones in it; every number random, by row seed.

    Pages lie in random order. Whatever is no live token is NaN: free pages, dead tails, unused entries of the tables,
    and what lies before the window of a row's first new token.
    """

    shape: Shape
    cached: Sequence[int]
    new: Sequence[int]
    seeds: Sequence[int] = tuple(range(ROWS))
    order: int = 0  # seed of the pages' order
    dtype: type = np.float32
    q: list[np.ndarray] = field(init=False)
    k: list[np.ndarray] = field(init=False)
    v: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        s = self.shape
        self.lengths = np.add(self.cached, self.new).astype(np.int32)
        draws = [np.random.default_rng(seed) for seed in self.seeds]
        self.k = [rng.normal(size=(s.context, s.kv_heads, s.head_dim)).astype(self.dtype) for rng in draws]
        self.v = [rng.normal(size=(s.context, s.kv_heads, s.head_dim)).astype(self.dtype) for rng in draws]
        self.q = [rng.normal(0, 2, (s.context, s.heads, s.head_dim)).astype(self.dtype) for rng in draws]
        self.tables, self.pages = self._paged()

    def _paged(self) -> tuple[np.ndarray, Pages]:
        s, rng = self.shape, np.random.default_rng(self.order)
        free = rng.permutation(ROWS * s.width + 2)
        tables = rng.choice(free, (ROWS, s.width)).astype(np.int32)
        pages = [np.full((len(free), s.kv_heads, s.page_size, s.head_dim), np.nan, self.dtype) for _ in range(2)]
        for row, length in enumerate(self.lengths):
            used = -(-length // s.page_size)
            tables[row, :used], free = free[:used], free[used:]
            behind = 0 if s.window is None else max(0, self.cached[row] - s.window + 1)
            for position in range(behind, length):
                at = tables[row, position // s.page_size], slice(None), position % s.page_size
                pages[0][at], pages[1][at] = self.k[row][position], self.v[row][position]
        return tables, Pages(*pages)

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.new)]).astype(np.int32)

    def decoded(self) -> np.ndarray:
        """[R, N, H]; the query of an empty row is NaN."""
        nothing = np.full_like(self.q[0][0], np.nan)
        q = np.stack([self.q[row][n - 1] if n else nothing for row, n in enumerate(self.lengths)])
        return np.asarray(DECODE(q, self.pages, self.tables, self.lengths, **self.shape.knobs))

    def prefilled(self) -> list[np.ndarray]:
        """Per row [new, N, H]. Queries that belong to no row are NaN, and must give zeros."""
        parts = [self.q[row][self.cached[row] : n] for row, n in enumerate(self.lengths)]
        padding = np.full((TOKENS - sum(self.new), *self.q[0].shape[1:]), np.nan, self.dtype)
        q = np.concatenate([*parts, padding])
        out = PREFILL(q, self.pages, self.tables, self.lengths, self.starts, **self.shape.knobs)
        *rows, rest = np.split(np.asarray(out), self.starts[1:])
        assert not rest.any()
        return rows

    def expected(self, row: int, positions: np.ndarray) -> np.ndarray:
        """Dense attention of a row's queries, [M, N, H] float64."""
        groups, visible = self.shape.heads // self.shape.kv_heads, self.shape.seen(positions)
        q, k, v = (x.astype(np.float64) for x in (self.q[row][positions], self.k[row], self.v[row]))
        out = np.empty(q.shape)
        for head in range(self.shape.heads):
            scores = np.where(visible, self.shape.scores(q[:, head] @ k[:, head // groups].T), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights @ v[:, head // groups] / weights.sum(-1, keepdims=True)
        return out


def border_lengths(shape: Shape) -> st.SearchStrategy[list[int]]:
    """Lengths around the borders of pages, of blocks of 64 and of the table; empty rows among them."""
    borders = [n + d for n in (0, shape.page_size, 2 * shape.page_size, 64, 128, shape.context) for d in (-1, 0, 1)]
    fitting = sorted({n for n in borders if 0 <= n <= shape.context})
    return st.lists(st.sampled_from(fitting), min_size=ROWS, max_size=ROWS)


@st.composite
def chunks(draw: st.DrawFn, shape: Shape) -> tuple[list[int], list[int]]:
    """cached and new tokens per row: prompts from the start, continuations, decodes and empty chunks in one step."""
    new, left = [], TOKENS
    for _ in range(ROWS):
        size = min(draw(st.sampled_from([0, 0, 1, 2, 31, 32, 33, 50, 70])), left, shape.context)
        new.append(size)
        left -= size
    lengths = draw(border_lengths(shape))
    return [max(length - size, 0) for length, size in zip(lengths, new, strict=True)], new


def check_decode(case: Case, tolerance: float) -> None:
    for row, out in enumerate(case.decoded()):
        length = case.lengths[row]
        expected = case.expected(row, length[None] - 1)[0] if length else np.zeros(out.shape)
        np.testing.assert_allclose(out, expected, atol=tolerance, err_msg=f"row {row} of lengths {case.lengths}")


def check_prefill(case: Case, tolerance: float) -> None:
    for row, out in enumerate(case.prefilled()):
        if len(out):
            expected = case.expected(row, np.arange(case.cached[row], case.lengths[row]))
            where = f"row {row} of {case.new} new after {case.cached}"
            np.testing.assert_allclose(out, expected, atol=tolerance, err_msg=where)


few_examples = partial(settings, deadline=None, derandomize=True, database=None)


@every_shape
def test_decode_is_dense_attention(shape: Shape) -> None:
    @few_examples(max_examples=20)
    @given(border_lengths(shape), st.integers(0, 2**32 - 1))
    def check(lengths: list[int], order: int) -> None:
        check_decode(
            Case(shape, [max(n - 1, 0) for n in lengths], [min(n, 1) for n in lengths], order=order), TOLERANCE
        )

    check()


@every_shape
def test_prefill_is_dense_attention(shape: Shape) -> None:
    @few_examples(max_examples=20)
    @given(chunks(shape), st.integers(0, 2**32 - 1))
    def check(sizes: tuple[list[int], list[int]], order: int) -> None:
        check_prefill(Case(shape, *sizes, order=order), TOLERANCE)

    check()


def test_bfloat16_is_within_its_rounding() -> None:
    """Products in float32; weights round to bfloat16 before they meet v: 2**-8 of values around 1."""
    case = Case(SHAPES[2], cached=[0, 99, 16, 0, 43], new=[33, 1, 17, 0, 20], dtype=ml_dtypes.bfloat16)
    check_prefill(case, 2e-2)
    check_decode(case, 2e-2)


# ---- neighbours


@every_shape
def test_a_row_has_the_same_bits_whatever_its_neighbours(shape: Shape) -> None:
    """In any slot and packing offset, in any pages, beside rows that are longer, shorter, empty or NaN."""
    mine, cached, new = 1234, shape.context - 37, 37
    decoded, prefilled = set(), set()
    for slot, order in ((0, 1), (2, 2), (ROWS - 1, 3)):
        for others in ([0] * ROWS, [7, 1, 0, 9, 3], [shape.context] * ROWS):
            lengths = list(others)
            lengths[slot] = 0
            sizes = [min(n, 10) for n in lengths]
            before = [n - size for n, size in zip(lengths, sizes, strict=True)]
            before[slot], sizes[slot] = cached, new
            seeds = [mine if row == slot else 100 * order + row for row in range(ROWS)]
            case = Case(shape, before, sizes, seeds, order)
            decoded.add(case.decoded()[slot].tobytes())
            prefilled.add(case.prefilled()[slot].tobytes())
            for row in range(ROWS):
                if row != slot:
                    case.q[row][:] = np.nan
                    used = case.tables[row, : -(-case.lengths[row] // shape.page_size)]
                    case.pages.k[used], case.pages.v[used] = np.nan, np.nan
            decoded.add(case.decoded()[slot].tobytes())
            prefilled.add(case.prefilled()[slot].tobytes())
    assert len(decoded) == len(prefilled) == 1


# ---- writing and reading


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_write_stores_tokens_and_drops_padding(dtype: type) -> None:
    rng = np.random.default_rng(0)
    pages = allocate(6, 2, 4, 8, jnp.dtype(dtype))
    assert pages.k.shape == pages.v.shape == (6, 2, 4, 8) and pages.k.dtype == pages.v.dtype == dtype
    expected = np.zeros((2, 6, 2, 4, 8), dtype)
    k, v = rng.normal(size=(2, 5, 2, 8)).astype(np.float32)
    page, offset = np.array([5, 0, 6, 3, 6], np.int32), np.array([3, 0, 1, 2, 0], np.int32)  # 6 does not exist
    for token in (0, 1, 3):
        expected[0, page[token], :, offset[token]] = k[token].astype(dtype)
        expected[1, page[token], :, offset[token]] = v[token].astype(dtype)
    written = jax.jit(write, donate_argnums=0)(pages, k, v, page, offset)
    np.testing.assert_array_equal(written.k, expected[0])
    np.testing.assert_array_equal(written.v, expected[1])
    assert pages.k.is_deleted()


def test_pages_travel_in_canonical_order() -> None:
    """What `write` stored comes out as [n, Z, K, H] and goes back into other pages; nothing else changes."""
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 8, 2, 8)).astype(np.float32)
    ids, offset = np.array([4, 1], np.int32), np.arange(8, dtype=np.int32) % 4
    pages = jax.jit(write)(allocate(6, 2, 4, 8, jnp.dtype(np.float32)), k, v, ids.repeat(4), offset)
    out_k, out_v = jax.jit(read)(pages, ids)
    np.testing.assert_array_equal(out_k, k.reshape(2, 4, 2, 8))
    np.testing.assert_array_equal(out_v, v.reshape(2, 4, 2, 8))
    elsewhere = np.array([0, 5], np.int32)
    moved = jax.jit(write_back)(pages, elsewhere, out_k, out_v)
    for old, new in zip(pages, moved, strict=True):
        np.testing.assert_array_equal(new[elsewhere], old[ids])
        np.testing.assert_array_equal(new[1:5], old[1:5])
