"""The TPU kernel keeps the contract, in Pallas's TPU interpreter.

The interpreter does what a chip would do copy by copy, and finds races. Numbers are right against
dense attention in float64, whatever lies in pages that no query sees.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.paged_attention import tpu
from tests.pallas_kernels.attention_case import (
    BF16_TOLERANCE,
    TOLERANCE,
    Case,
    Shape,
    check_decode,
    check_prefill,
    compiled,
)
from tests.pallas_kernels.attention_sizes import chunks, decodes
from tests.pallas_kernels.kernel_checks import (
    check_that_lse_is_for_those_who_ask,
    check_that_nan_is_seen,
    check_that_neighbours_change_no_bit,
    check_tiles_of_few_tokens,
    chunk_cases,
    decode_cases,
)
from tests.slow_cases import slow_but

BF16 = ml_dtypes.bfloat16
INT8 = np.int8
FP8 = ml_dtypes.float8_e4m3fn
SHAPES = [
    Shape(heads=4, kv_heads=2, head_dim=128, page_size=16, width=9),
    Shape(
        heads=32, kv_heads=1, head_dim=64, page_size=64, width=10
    ),  # tiles of 16 tokens, two blocks
    Shape(heads=3, kv_heads=3, head_dim=80, page_size=8, width=20),
    Shape(heads=2, kv_heads=2, head_dim=256, page_size=32, width=4, softcap=1.5),
    Shape(heads=4, kv_heads=2, head_dim=64, page_size=8, width=80, window=64, sinks=True),
    Shape(heads=8, kv_heads=1, head_dim=32, page_size=16, width=40, window=1),
    Shape(heads=5, kv_heads=1, head_dim=36, page_size=16, width=9, value_dim=32),
    Shape(heads=14, kv_heads=2, head_dim=64, page_size=16, width=9, dtype=BF16, stored=BF16),
    Shape(
        heads=2,
        kv_heads=1,
        head_dim=576,
        page_size=64,
        width=2,
        value_dim=512,
        dtype=BF16,
        stored=BF16,
    ),
    Shape(heads=4, kv_heads=2, head_dim=64, page_size=128, width=5, stored=INT8),
    Shape(
        heads=4, kv_heads=2, head_dim=128, page_size=128, width=2, window=20, dtype=BF16, stored=FP8
    ),
    Shape(
        heads=3,
        kv_heads=1,
        head_dim=36,
        page_size=128,
        width=2,
        value_dim=32,
        stored=INT8,
        sinks=True,
    ),
]
BY_NAME = {str(shape): shape for shape in SHAPES}
# Together they have every dtype of pages, windows, caps, sinks and latent pages.
QUICK = (
    "N4K2H64Z8-float32-W64-sinksTrue",
    "N14K2H64Z16-bfloat16",
    "N4K2H64Z128-int8",
    "N4K2H128Z128-float8_e4m3fn-W20",
)
QUICK_CHUNKS = ("N2K2H256Z32-float32-cap1.5", "N3K1H36Z128-int8-latent32-sinksTrue")
QUICK_SHAPES = [BY_NAME[name] for name in QUICK]
CHUNK_SHAPES = [BY_NAME[name] for name in QUICK_CHUNKS]
every_shape = pytest.mark.parametrize("shape", slow_but(SHAPES, QUICK_SHAPES), ids=str)


@pytest.fixture(autouse=True)
def interpreted_kernels() -> Iterator[None]:
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    compiled.cache_clear()


def tolerance(shape: Shape) -> float:
    return BF16_TOLERANCE if shape.dtype is BF16 else TOLERANCE


@pytest.mark.kernels
@every_shape
def test_decode_is_dense_attention(shape: Shape) -> None:
    for case in decode_cases(tpu, shape):
        check_decode(case, tolerance(shape))


@pytest.mark.kernels
@pytest.mark.parametrize("shape", slow_but(SHAPES, CHUNK_SHAPES), ids=str)
def test_chunks_are_dense_attention(shape: Shape) -> None:
    for case in chunk_cases(tpu, shape):
        check_prefill(case, tolerance(shape))


@pytest.mark.kernels
def test_a_row_has_the_same_bits_whatever_its_neighbours() -> None:
    check_that_neighbours_change_no_bit(tpu, SHAPES[0])


@pytest.mark.kernels
def test_chunks_of_a_few_tokens_have_tiles_of_a_few() -> None:
    check_tiles_of_few_tokens(tpu, SHAPES[0], 5, TOLERANCE)


@pytest.mark.kernels
def test_nan_in_a_row_is_seen_by_that_row() -> None:
    check_that_nan_is_seen(tpu, SHAPES[0])


@pytest.mark.kernels
def test_lse_is_for_those_who_ask() -> None:
    check_that_lse_is_for_those_who_ask(tpu, SHAPES[0])


@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[6], SHAPES[9]], ids=str)
def test_pages_travel_in_canonical_order(shape: Shape) -> None:
    """Pages written back are read again as [n, Z, K, H], and nothing else changes."""
    rng = np.random.default_rng(0)
    layout = shape.layout
    heads = (3, shape.page_size, shape.kv_heads)
    ids = np.array([4, 0, 2], np.int32)
    pages = tpu.allocate(6, layout)

    def numbers(*shape: int) -> jax.Array:
        return jnp.asarray(rng.integers(-99, 99, shape), np.float32)

    k = numbers(*heads, shape.head_dim).astype(layout.dtype)
    v = None if shape.value_dim else numbers(*heads, shape.head_dim).astype(layout.dtype)
    scales = [
        numbers(*heads) if layout.scaled else None,
        numbers(*heads) if layout.scaled and v is not None else None,
    ]
    given = tpu.Pages(k, v, *scales)
    after = tpu.write_back(pages, ids, given, layout)
    found = tpu.read(after, ids, layout)
    jax.tree.map(np.testing.assert_array_equal, found, given)
    others = tpu.read(after, np.array([1, 3, 5], np.int32), layout)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(others))
    dropped = tpu.write_back(after, np.array([6, 6, 6], np.int32), given, layout)
    jax.tree.map(np.testing.assert_array_equal, dropped, after)


# ---- many more, by `make test-kernels`

many_examples = settings(deadline=None, derandomize=True, database=None, max_examples=60)


@pytest.mark.kernels
@pytest.mark.random_kernels
@pytest.mark.timeout(3600)
@every_shape
def test_random_decodes(shape: Shape) -> None:
    @many_examples
    @given(decodes(shape), st.integers(0, 2**32 - 1))
    def check(sizes: tuple[list[int], list[int]], order: int) -> None:
        check_decode(Case(tpu, shape, *sizes, order=order), tolerance(shape))

    check()


@pytest.mark.kernels
@pytest.mark.random_kernels
@pytest.mark.timeout(3600)
@every_shape
def test_random_chunks(shape: Shape) -> None:
    @many_examples
    @given(chunks(shape), st.integers(0, 2**32 - 1))
    def check(sizes: tuple[list[int], list[int]], order: int) -> None:
        check_prefill(Case(tpu, shape, *sizes, order=order), tolerance(shape))

    check()
