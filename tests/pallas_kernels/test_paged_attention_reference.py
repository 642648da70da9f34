"""The reference attention keeps the contract: dense attention, whatever the neighbours."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.paged_attention.api import (
    Demand,
    KernelError,
    Layout,
    Options,
    Ragged,
    quantize,
)
from jaxserve.pallas_kernels.paged_attention.reference import allocate, read, write, write_back
from tests.pallas_kernels.attention_case import (
    ROWS,
    SHAPES,
    TOLERANCE,
    Case,
    Shape,
    check_decode,
    check_prefill,
)
from tests.pallas_kernels.attention_sizes import chunks, decodes
from tests.pallas_kernels.kernel_checks import (
    check_a_context_of_128k_tokens,
    check_that_no_neighbour_changes_a_bit,
)
from tests.slow_cases import slow_but

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
# A plain one, one with a window and a soft cap, one with sinks, a latent one, and both of 8 bits.
QUICK_SHAPES = [SHAPES[i] for i in (2, 9, 10, 14, 15, 16)]
some_shapes = pytest.mark.parametrize("shape", slow_but(SHAPES, QUICK_SHAPES), ids=str)
few_examples = partial(settings, deadline=None, derandomize=True, database=None, max_examples=10)


@every_shape
def test_decode_is_dense_attention(shape: Shape) -> None:
    @few_examples()
    @given(decodes(shape), st.integers(0, 2**32 - 1))
    def check(sizes: tuple[list[int], list[int]], order: int) -> None:
        check_decode(Case(reference, shape, *sizes, order=order), TOLERANCE)

    check()


@some_shapes
def test_prefill_is_dense_attention(shape: Shape) -> None:
    @few_examples()
    @given(chunks(shape), st.integers(0, 2**32 - 1))
    def check(sizes: tuple[list[int], list[int]], order: int) -> None:
        check_prefill(Case(reference, shape, *sizes, order=order), TOLERANCE)

    check()


@pytest.mark.parametrize("shape", slow_but(SHAPES, [SHAPES[2], SHAPES[16]]), ids=str)
def test_in_a_program_whose_types_are_64_bits_wide(shape: Shape) -> None:
    with jax.enable_x64(True):
        check_decode(Case(reference, shape, [1, 9, 0, 4, 2], [1, 1, 1, 1, 1]), TOLERANCE)


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.int8, ml_dtypes.float8_e4m3fn], ids=str)
def test_bfloat16_is_within_its_rounding(stored: type) -> None:
    """Products are float32, and weights round to bfloat16 before they meet v.

    The error is 2**-8 of values around 1.
    """
    shape = Shape(
        heads=8,
        kv_heads=2,
        head_dim=16,
        page_size=16,
        width=9,
        dtype=ml_dtypes.bfloat16,
        stored=stored,
    )
    check_prefill(Case(reference, shape, cached=[99, 0, 16, 43, 0], new=[1, 33, 17, 20, 0]), 2e-2)
    check_decode(Case(reference, shape, cached=[99, 0, 16, 43, 0], new=[1, 1, 1, 1, 0]), 2e-2)


def test_a_context_of_128k_tokens() -> None:
    check_a_context_of_128k_tokens(reference)


# ---- neighbours


@some_shapes
def test_a_row_has_the_same_bits_whatever_its_neighbours(shape: Shape) -> None:
    check_that_no_neighbour_changes_a_bit(reference, shape)


# ---- pages


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5])
def test_write_stores_tokens_and_drops_padding(dtype: type, tokens: int) -> None:
    rng = np.random.default_rng(0)
    pages = allocate(6, Layout(2, 8, 4, jnp.dtype(dtype)))
    assert (
        pages.k.shape == pages.v.shape == (6, 2, 4, 8) and pages.k.dtype == pages.v.dtype == dtype
    )
    expected = np.zeros((2, 6, 2, 4, 8), dtype)
    k, v = rng.normal(size=(2, tokens, 2, 8)).astype(np.float32)
    page = np.array([5, 0, 6, 3, 6], np.int32)[:tokens]  # 6 does not exist
    offset = np.array([3, 0, 1, 2, 0], np.int32)[:tokens]
    for token in range(tokens):
        if page[token] < 6:
            expected[0, page[token], :, offset[token]] = k[token].astype(dtype)
            expected[1, page[token], :, offset[token]] = v[token].astype(dtype)
    written = jax.jit(write, donate_argnums=0)(pages, k, v, page, offset)
    np.testing.assert_array_equal(written.k, expected[0])
    np.testing.assert_array_equal(written.v, expected[1])
    assert pages.k.is_deleted()


@pytest.mark.parametrize("layout", [
    Layout(2, 8, 4, jnp.dtype(np.float32)),
    Layout(2, 8, 4, jnp.dtype(np.int8)),
    Layout(1, 8, 4, jnp.dtype(jnp.bfloat16), value_dim=6),
], ids=lambda layout: str(layout.dtype))  # fmt: skip
def test_pages_travel_in_canonical_order(layout: Layout) -> None:
    """Stored tokens are read as [n, Z, K, H] and written back into other pages.

    Nothing else changes.
    """
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 8, layout.kv_heads, 8)).astype(np.float32)
    ids = np.array([4, 1], np.int32)
    offset = np.arange(8, dtype=np.int32) % 4
    pages = jax.jit(write)(
        allocate(6, layout), k, None if layout.value_dim else v, ids.repeat(4), offset
    )
    found = jax.jit(read, static_argnums=2)(pages, ids, layout)
    if layout.scaled:
        stored, scale = quantize(k, layout.dtype)
        np.testing.assert_array_equal(found.k_scale, scale.reshape(2, 4, -1))
    else:
        stored = k.astype(layout.dtype)
    np.testing.assert_array_equal(found.k, np.asarray(stored).reshape(2, 4, -1, 8))
    assert (found.v is None) == (layout.value_dim is not None)
    elsewhere = np.array([0, 5], np.int32)
    moved = jax.jit(write_back, static_argnums=3)(pages, elsewhere, found, layout)
    for old, new in zip(jax.tree.leaves(pages), jax.tree.leaves(moved), strict=True):
        np.testing.assert_array_equal(new[elsewhere], old[ids])
        np.testing.assert_array_equal(new[1:5], old[1:5])


@pytest.mark.parametrize(("dtype", "step"), [(jnp.int8, 0.5 / 127), (jnp.float8_e4m3fn, 2.0**-4)])
def test_eight_bits_are_within_their_rounding(dtype: type, step: float) -> None:
    """Numbers are within half a step of what was stored, and zeros stay zeros.

    A step of int8 is a share of the largest number; of e4m3, a unit of 3 bits of each number.
    """
    x = (
        np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32)
        * 10.0 ** np.arange(-25, 25)[:, None]
    )
    x[7] = 0
    stored, scale = quantize(jnp.asarray(x), jnp.dtype(dtype))
    back = np.asarray(stored, np.float64) * np.asarray(scale, np.float64)[:, None]
    largest = np.abs(x).max(-1, keepdims=True)
    bound = largest if dtype == jnp.int8 else np.maximum(np.abs(x), largest * 2**-14)
    assert (np.abs(back - x) <= bound * step * 1.001).all()


def test_lse_is_for_those_who_ask() -> None:
    case = Case(reference, SHAPES[2], cached=[40, 3, 0, 0, 0], new=[1, 1, 1, 0, 0])
    asked = case.run(ROWS, decode=True)
    plain = replace(SHAPES[2].options(decode=True), lse=False)
    arguments = [jnp.zeros((2, heads, 16)) for heads in (8, 2, 2)]
    ragged = Ragged(*(jnp.zeros(shape, jnp.int32) for shape in ((2, 9), 2, 3, 2, 2, 2)))
    assert asked.lse is not None
    assert (
        reference.attend(*arguments, reference.allocate(9, SHAPES[2].layout), ragged, plain).lse
        is None
    )


def test_a_ragged_step_of_one_token() -> None:
    case = Case(reference, SHAPES[2], cached=[40, 0, 0, 0, 0], new=[1, 0, 0, 0, 0])
    found = case.run(1, decode=False)
    np.testing.assert_allclose(found.out, case.expected(0)[0], atol=TOLERANCE)


def test_nan_in_a_row_is_seen_by_that_row() -> None:
    case = Case(reference, SHAPES[2], cached=[40, 3, 0, 0, 0], new=[1, 1, 0, 0, 0], poisoned=[0])
    out, lse = case.run_decode()
    assert np.isnan(out[0]).all() and np.isnan(lse[0]).all() and np.isfinite(out[1]).all()


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_write_does_not_copy_the_pages(kv_heads: int, tokens: int) -> None:
    """Writing one token of one head does not become a select and a copy in XLA."""
    pages = jax.eval_shape(lambda: allocate(4096, Layout(kv_heads, 64, 16, jnp.dtype(np.float32))))
    new = jax.ShapeDtypeStruct((tokens, kv_heads, 64), np.float32)
    at = jax.ShapeDtypeStruct((tokens,), np.int32)
    memory = (
        jax.jit(reference.write, donate_argnums=0)
        .lower(pages, new, new, at, at)
        .compile()
        .memory_analysis()
    )
    assert memory.alias_size_in_bytes == 2 * pages.k.size * 4
    assert memory.temp_size_in_bytes < pages.k.size * 4 / 100


# ---- what cannot be


def test_heads_that_do_not_divide_are_refused() -> None:
    layout = Layout(4, 64, 16, jnp.dtype(np.float32))
    with pytest.raises(KernelError, match="6 query heads do not divide by 4 kv heads"):
        reference.check(Options(layout, 1.0), Demand(6, 4, 10, jnp.dtype(np.float32), "cpu"))


@pytest.mark.parametrize(("kv_heads", "value_dim"), [(2, 32), (1, 65), (1, -1)])
def test_latent_pages_have_one_head(kv_heads: int, value_dim: int) -> None:
    with pytest.raises(KernelError, match="latent pages have one head"):
        Layout(kv_heads, 64, 16, jnp.dtype(np.float32), value_dim)
