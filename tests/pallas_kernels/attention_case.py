"""Cases of paged attention, and their expected results from dense attention in float64 numpy.

Any implementation of the contract is run through them. Pages lie in random order, and whatever no
query may read is poison: free pages, dead tails, unused entries of the tables, and positions before
the window of a row's first token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxserve.pallas_kernels.paged_attention.api import (
    Attended,
    Layout,
    Options,
    PagedAttention,
    Pages,
    Ragged,
)

TOKENS = 80  # of a ragged step
ROWS = 5
LARGEST = {np.dtype(np.int8): 127.0, np.dtype(ml_dtypes.float8_e4m3fn): 448.0}


@dataclass(frozen=True)
class Shape:
    """Sizes of a case; dtype: of queries, keys and values; stored: of pages."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    width: int  # entries of a page table
    window: int | None = None
    softcap: float | None = None
    value_dim: int | None = None
    sinks: bool = False
    dtype: type = np.float32
    stored: type = np.float32

    def __str__(self) -> str:
        extras = {
            "W": self.window,
            "cap": self.softcap,
            "latent": self.value_dim,
            "sinks": self.sinks or None,
        }
        said = "".join(f"-{name}{value}" for name, value in extras.items() if value is not None)
        sizes = f"N{self.heads}K{self.kv_heads}H{self.head_dim}Z{self.page_size}"
        return f"{sizes}-{np.dtype(self.stored)}{said}"

    @property
    def context(self) -> int:
        return self.page_size * self.width

    @property
    def layout(self) -> Layout:
        return Layout(
            self.kv_heads, self.head_dim, self.page_size, jnp.dtype(self.stored), self.value_dim
        )

    @property
    def scale(self) -> float:
        """Return a scale other than the usual one, so that a kernel that ignores it is caught."""
        return 0.9 * self.head_dim**-0.5

    def options(self, *, decode: bool) -> Options:
        max_row_tokens = 1 if decode else None
        kind = jax.devices()[0].device_kind
        return Options(
            self.layout,
            self.scale,
            self.window,
            self.softcap,
            max_row_tokens,
            lse=True,
            device_kind=kind,
        )

    def scores(self, products: np.ndarray) -> np.ndarray:
        scaled = products * self.scale
        return scaled if self.softcap is None else self.softcap * np.tanh(scaled / self.softcap)

    def visible_positions(self, queries: np.ndarray) -> np.ndarray:
        """Return which positions the queries see, [M, S]."""
        distance = queries[:, None] - np.arange(self.context)
        return (distance >= 0) & (distance < (self.window or self.context))

    def as_stored(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return vectors [..., H] as pages hold them, and their scales [...] if pages have some."""
        if np.dtype(self.stored) not in LARGEST:
            return x.astype(self.stored), None
        wide = x.astype(np.float32)
        scale = np.abs(wide).max(-1) * np.float32(1 / LARGEST[np.dtype(self.stored)])
        unit = wide / np.where(scale > 0, scale, 1)[..., None]
        with np.errstate(invalid="ignore"):  # NaN, in the rows of poisoned neighbours
            return (np.rint(unit) if self.stored is np.int8 else unit).astype(self.stored), scale


TOLERANCE = 1e-5  # scores of up to 20 carry float32's rounding into the exponent

SHAPES = [
    Shape(heads=4, kv_heads=4, head_dim=8, page_size=1, width=70),
    Shape(heads=6, kv_heads=1, head_dim=80, page_size=3, width=31),
    Shape(heads=8, kv_heads=2, head_dim=16, page_size=16, width=9),
    Shape(heads=4, kv_heads=2, head_dim=64, page_size=64, width=2),
    Shape(heads=3, kv_heads=3, head_dim=128, page_size=100, width=2),
    Shape(heads=2, kv_heads=1, head_dim=192, page_size=256, width=1),
    Shape(heads=2, kv_heads=2, head_dim=256, page_size=32, width=3),
    Shape(heads=4, kv_heads=2, head_dim=96, page_size=16, width=9, sinks=True),
    Shape(heads=4, kv_heads=2, head_dim=16, page_size=4, width=50, window=1),
    Shape(heads=4, kv_heads=2, head_dim=16, page_size=8, width=25, window=64, softcap=2.0),
    Shape(heads=8, kv_heads=1, head_dim=32, page_size=16, width=14, window=75, sinks=True),
    Shape(heads=4, kv_heads=4, head_dim=8, page_size=32, width=4, softcap=1.5),
    Shape(heads=5, kv_heads=1, head_dim=36, page_size=16, width=9, value_dim=32),
    Shape(heads=2, kv_heads=1, head_dim=576, page_size=64, width=2, value_dim=512),
    Shape(heads=4, kv_heads=2, head_dim=64, page_size=16, width=9, stored=np.int8),
    Shape(
        heads=4,
        kv_heads=2,
        head_dim=16,
        page_size=16,
        width=9,
        stored=ml_dtypes.float8_e4m3fn,
        window=20,
    ),
    Shape(
        heads=3,
        kv_heads=1,
        head_dim=36,
        page_size=16,
        width=9,
        value_dim=32,
        stored=np.int8,
        sinks=True,
    ),
]
BF16 = ml_dtypes.bfloat16
FP8 = ml_dtypes.float8_e4m3fn
BF16_SHAPES = [
    replace(shape, dtype=BF16, stored=BF16)
    for shape in (
        Shape(heads=4, kv_heads=2, head_dim=128, page_size=64, width=9),
        Shape(heads=32, kv_heads=1, head_dim=64, page_size=64, width=10),
        Shape(heads=14, kv_heads=2, head_dim=64, page_size=128, width=3),
        Shape(heads=64, kv_heads=1, head_dim=128, page_size=64, width=5),
        Shape(heads=3, kv_heads=3, head_dim=192, page_size=64, width=3, sinks=True),
        Shape(heads=2, kv_heads=1, head_dim=256, page_size=64, width=6, softcap=1.5),
        Shape(
            heads=4,
            kv_heads=2,
            head_dim=64,
            page_size=64,
            width=9,
            window=70,
            sinks=True,
            softcap=2.0,
        ),
        Shape(heads=8, kv_heads=1, head_dim=64, page_size=16, width=30, window=1),
        Shape(heads=4, kv_heads=2, head_dim=128, page_size=64, width=9, window=300),
    )
] + [
    Shape(heads=4, kv_heads=2, head_dim=128, page_size=64, width=9, dtype=BF16, stored=np.int8),
    Shape(
        heads=14, kv_heads=2, head_dim=64, page_size=128, width=3, window=70, dtype=BF16, stored=FP8
    ),
    Shape(heads=130, kv_heads=2, head_dim=64, page_size=64, width=5, dtype=BF16, stored=BF16),
    Shape(
        heads=5,
        kv_heads=1,
        head_dim=192,
        page_size=64,
        width=9,
        value_dim=128,
        dtype=BF16,
        stored=BF16,
    ),
    Shape(
        heads=3,
        kv_heads=1,
        head_dim=576,
        page_size=64,
        width=6,
        value_dim=512,
        window=99,
        dtype=BF16,
        stored=BF16,
    ),
]
BF16_TOLERANCE = 2e-2  # weights are rounded before they meet values around 1, and so is the result


@cache
def compiled(attention: PagedAttention, options: Options) -> Callable[..., Attended]:
    """Return a compiled attend(q, k, v, pages, ragged, sinks); the pages are donated."""
    return jax.jit(
        lambda *arguments: attention.attend(*arguments[:5], options, *arguments[5:]),
        donate_argnums=3,
    )


@dataclass
class Case:
    """Rows with `cached` tokens in pages before the step and `new` ones in it, with random numbers.

    Numbers depend on the row's seed alone. new: in the order of the contract, see `contract_order`.
    poisoned: rows whose numbers are all NaN. done: rows that ended before the step: their tokens
    must not be stored, and their results are not checked.
    """

    attention: PagedAttention
    shape: Shape
    cached: Sequence[int]
    new: Sequence[int]
    seeds: Sequence[int] = tuple(range(ROWS))
    order: int = 0  # seed of the pages' order
    poisoned: Sequence[int] = ()
    done: Sequence[int] = ()
    q: list[np.ndarray] = field(init=False)
    k: list[np.ndarray] = field(init=False)
    v: list[np.ndarray] = field(init=False)
    written: Pages = field(init=False)  # canonical pages after the step

    def __post_init__(self) -> None:
        s = self.shape
        self.lengths = (np.add(self.cached, self.new) * (np.asarray(self.new) > 0)).astype(np.int32)
        draws = [np.random.default_rng(seed) for seed in self.seeds]
        self.k = [
            rng.normal(size=(s.context, s.kv_heads, s.head_dim)).astype(s.dtype) for rng in draws
        ]
        self.v = [
            rng.normal(size=(s.context, s.kv_heads, s.head_dim)).astype(s.dtype) for rng in draws
        ]
        self.q = [
            rng.normal(0, 2, (s.context, s.heads, s.head_dim)).astype(s.dtype) for rng in draws
        ]
        for row in self.poisoned:
            self.q[row][:] = self.k[row][:] = self.v[row][:] = np.nan
        self.sinks = (
            np.random.default_rng(77).normal(0, 2, s.heads).astype(np.float32) if s.sinks else None
        )
        self.tables, self.pages = self._make_pages()

    def _make_pages(self) -> tuple[np.ndarray, Pages]:
        """Return tables and canonical pages [P, K, Z, H].

        The pages hold the cached tokens that queries see; the tables have entries for all tokens.
        """
        s = self.shape
        rng = np.random.default_rng(self.order)
        free = rng.permutation(ROWS * s.width + 2)
        tables = rng.choice(free, (ROWS, s.width)).astype(np.int32)
        pages = _poisoned_pages(s, len(free))
        for row, length in enumerate(self.lengths):
            used = -(-length // s.page_size)
            tables[row, :used] = free[:used]
            free = free[used:]
            behind = 0 if s.window is None else max(0, self.cached[row] - s.window + 1)
            if length:
                self._store(pages, tables[row], row, np.arange(behind, self.cached[row]))
        return tables, pages

    def _store(self, pages: Pages, table: np.ndarray, row: int, positions: np.ndarray) -> None:
        at = table[positions // self.shape.page_size], slice(None), positions % self.shape.page_size
        for name, scale_name, vectors in (("k", "k_scale", self.k), ("v", "v_scale", self.v)):
            if (pool := getattr(pages, name)) is None:
                continue
            pool[at], scale = self.shape.as_stored(vectors[row][positions])
            if scale is not None:
                getattr(pages, scale_name)[at] = scale

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.new)]).astype(np.int32)

    def run(
        self,
        tokens: int,
        *,
        decode: bool,
        max_row_tokens: int | None = None,
        options: Options | None = None,
    ) -> Attended:
        """Run the step with its new tokens packed into `tokens`.

        Queries that belong to no row are NaN. max_row_tokens: as in `Options`, for a step that is
        no decode step. options: replaces the options of the shape.
        """
        s = self.shape
        live = int(self.starts[-1])
        row = np.repeat(np.arange(ROWS), self.new)
        position = np.concatenate(
            [np.arange(n - size, n) for n, size in zip(self.lengths, self.new, strict=True)]
        )
        parts = [
            np.full((tokens, *x[0].shape[1:]), np.nan, s.dtype) for x in (self.q, self.k, self.v)
        ]
        for part, vectors in zip(parts, (self.q, self.k, self.v), strict=True):
            part[:live] = [vectors[r][p] for r, p in zip(row, position, strict=True)] if live else 0
        page = np.full(tokens, len(self.pages.k), np.int32)
        offset = np.zeros(tokens, np.int32)
        page[:live] = np.where(
            np.isin(row, self.done), page[:live], self.tables[row, position // s.page_size]
        )
        offset[:live] = position % s.page_size
        sizes = np.asarray(self.new)
        split = np.array([np.cumprod(sizes == 1).sum(), (sizes > 0).sum()], np.int32)
        ragged = Ragged(self.tables, self.lengths, self.starts, split, page, offset)
        q, k, v = parts
        pages = self._implementation_pages()
        options = options or replace(
            s.options(decode=decode), max_row_tokens=1 if decode else max_row_tokens
        )
        found = compiled(self.attention, options)(
            q, k, None if s.value_dim else v, pages, ragged, self.sinks
        )
        # Interpreters run kernels in threads that XLA:CPU may starve for what is dispatched
        # meanwhile.
        jax.block_until_ready(found)
        self._check_pages(found.pages)
        return found

    def _implementation_pages(self) -> Pages:
        """Return the pages as the implementation lays them out."""
        num_pages = len(self.pages.k)
        canonical = jax.tree.map(lambda x: jnp.asarray(x.swapaxes(1, 2)), self.pages)
        return self.attention.write_back(
            self.attention.allocate(num_pages, self.shape.layout),
            jnp.arange(num_pages),
            canonical,
            self.shape.layout,
        )

    def _check_pages(self, after: Pages) -> None:
        """Check that new tokens are stored in their places and that nothing else has changed.

        The comparison is bit for bit, except for 8-bit numbers and their scales: where a quotient
        lies between two numbers, either is right. NaN in 8 bits has no defined result.
        """
        self.written = jax.tree.map(np.copy, self.pages)
        for row, size in enumerate(self.new):
            if row in self.done:
                continue
            self._store(
                self.written,
                self.tables[row],
                row,
                np.arange(self.lengths[row] - size, self.lengths[row]),
            )
        canonical = self.attention.read(after, jnp.arange(len(self.pages.k)), self.shape.layout)
        found = jax.tree.map(lambda x: np.asarray(x).swapaxes(1, 2), canonical)
        for name, ours, theirs in zip(Pages._fields, found, self.written, strict=True):
            if theirs is not None:
                wrong = ~_equal_in_pages(ours, theirs)
                for row in self.poisoned if self.shape.layout.scaled else ():
                    wrong[self.tables[row][: -(-self.lengths[row] // self.shape.page_size)]] = False
                assert not wrong.any(), f"{name}: {np.argwhere(wrong)[:3]}"
        self.written = found

    def _read(self, row: int, name: str) -> np.ndarray:
        """Return a row's keys ("k") or values ("v") after the step, [S, K, H] in float64."""
        positions = np.arange(self.shape.context)
        at = (
            self.tables[row][positions // self.shape.page_size],
            slice(None),
            positions % self.shape.page_size,
        )
        stored = getattr(self.written, name)[at].astype(np.float64)
        scale = getattr(self.written, f"{name}_scale")
        with np.errstate(invalid="ignore"):  # NaN, in the rows of poisoned neighbours
            return stored if scale is None else stored * scale[at][..., None]

    def run_decode(self) -> tuple[np.ndarray, np.ndarray]:
        """Return out [R, N, V] and lse [R, N] of a decode step."""
        found = self.run(ROWS, decode=True)
        return np.asarray(found.out), np.asarray(found.lse)

    def run_prefill(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return out [new, N, V] and lse [new, N] of each row.

        Tokens that belong to no row must have zeros.
        """
        found = self.run(TOKENS, decode=False)
        *out, rest = np.split(np.asarray(found.out), self.starts[1:])
        assert not rest.any()
        *lse, rest = np.split(np.asarray(found.lse), self.starts[1:])
        assert (rest == -np.inf).all()
        return out, lse

    def expected(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return dense attention of a row's new queries: out [new, N, V], lse [new, N], float64."""
        s = self.shape
        positions = np.arange(self.lengths[row] - self.new[row], self.lengths[row])
        groups = s.heads // s.kv_heads
        visible = s.visible_positions(positions)
        q = self.q[row][positions].astype(np.float64)
        k = self._read(row, "k")
        v = self._read(row, "v") if s.value_dim is None else k[..., : s.value_dim]
        k, v = (np.where(visible.any(0)[:, None, None], x, 0) for x in (k, v))  # poison
        out = np.empty((len(q), s.heads, v.shape[-1]))
        lse = np.empty((len(q), s.heads))
        for head in range(s.heads):
            scores = np.where(visible, s.scores(q[:, head] @ k[:, head // groups].T), -np.inf)
            weights = np.exp(scores)
            total = weights.sum(-1) + (
                0 if self.sinks is None else np.exp(np.float64(self.sinks[head]))
            )
            out[:, head] = weights @ v[:, head // groups] / total[:, None]
            lse[:, head] = np.log(total)
        return out, lse


def _equal_in_pages(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return where numbers in pages are what they have to be."""
    a = ours.astype(np.float32)
    b = theirs.astype(np.float32)
    if theirs.dtype == np.int8:
        return np.abs(a - b) <= 1
    if theirs.dtype in LARGEST:
        return np.abs(a - b) <= np.maximum(np.abs(b) / 8, 2**-9)
    return np.isclose(a, b, rtol=1e-6 if theirs.ndim == 3 else 0, atol=0, equal_nan=True)


def _poisoned_pages(s: Shape, num_pages: int) -> Pages:
    """Return pages that may not be read: NaN, or numbers with NaN for a scale."""

    def pool() -> tuple[np.ndarray, np.ndarray | None]:
        shape = (num_pages, s.kv_heads, s.page_size)
        if np.dtype(s.stored) in LARGEST:
            return np.full((*shape, s.head_dim), 77, s.stored), np.full(shape, np.nan, np.float32)
        return np.full((*shape, s.head_dim), np.nan, s.stored), None

    k, k_scale = pool()
    v, v_scale = pool() if s.value_dim is None else (None, None)
    return Pages(k, v, k_scale, v_scale)


def check_decode(case: Case, tolerance: float) -> None:
    out, lse = case.run_decode()
    for row, size in enumerate(case.new):
        if row in case.done or row in case.poisoned:
            continue
        if size:
            expected = case.expected(row)
            where = f"row {row} of lengths {case.lengths}"
            np.testing.assert_allclose(
                out[row].astype(np.float64), expected[0][0], atol=tolerance, err_msg=where
            )
            np.testing.assert_allclose(lse[row], expected[1][0], atol=10 * tolerance, err_msg=where)
        else:
            assert not out[row].any() and (lse[row] == -np.inf).all()


def check_prefill(case: Case, tolerance: float) -> None:
    for row, (out, lse) in enumerate(zip(*case.run_prefill(), strict=True)):
        if len(out) and row not in (*case.done, *case.poisoned):
            expected = case.expected(row)
            where = f"row {row} of {case.new} new after {case.cached}"
            np.testing.assert_allclose(
                out.astype(np.float64), expected[0], atol=tolerance, err_msg=where
            )
            np.testing.assert_allclose(lse, expected[1], atol=10 * tolerance, err_msg=where)
