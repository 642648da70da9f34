"""The Hopper kernel keeps the contract, in Pallas's interpreter of GPUs or on a GPU.

The interpreter runs copies, barriers and warpgroups, and finds races. Numbers are right against
dense attention in float64, whatever lies in pages that no query sees. One step of the kernel has
another form here: the interpreter has no matrix product of one operand in registers.
"""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.pallas_kernels.paged_attention import gpu
from tests.pallas_kernels.attention_case import (
    BF16_SHAPES,
    BF16_TOLERANCE,
    Case,
    Shape,
    check_decode,
    check_prefill,
    compiled,
)
from tests.pallas_kernels.attention_sizes import chunks, decodes
from tests.pallas_kernels.hopper_kernels import interpreted_or_run
from tests.pallas_kernels.kernel_checks import (
    check_that_lse_is_for_those_who_ask,
    check_that_nan_is_seen,
    check_that_neighbours_change_no_bit,
    check_tiles_of_few_tokens,
    chunk_cases,
    decode_cases,
)
from tests.slow_cases import slow_but

BY_NAME = {str(shape): shape for shape in BF16_SHAPES}
# Together they have pages of 64 and 128 tokens, 16 and 8 bits, windows, caps, sinks, groups of 2, 5
# and 7 heads, and latent pages.
QUICK = ("N4K2H128Z64-bfloat16", "N4K2H128Z64-int8", "N14K2H64Z128-float8_e4m3fn-W70")
QUICK_CHUNKS = ("N4K2H64Z64-bfloat16-W70-cap2.0-sinksTrue", "N5K1H192Z64-bfloat16-latent128")
QUICK_SHAPES = [BY_NAME[name] for name in QUICK]
CHUNK_SHAPES = [BY_NAME[name] for name in QUICK_CHUNKS]
every_shape = pytest.mark.parametrize("shape", slow_but(BF16_SHAPES, QUICK_SHAPES), ids=str)


@pytest.fixture(autouse=True)
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with interpreted_or_run(monkeypatch):
        yield
    compiled.cache_clear()


@pytest.mark.kernels
@every_shape
def test_decode_is_dense_attention(shape: Shape) -> None:
    for case in decode_cases(gpu, shape):
        check_decode(case, BF16_TOLERANCE)


@pytest.mark.kernels
@pytest.mark.parametrize("shape", slow_but(BF16_SHAPES, CHUNK_SHAPES), ids=str)
def test_chunks_are_dense_attention(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SMALL_STEP", 0)
    for case in chunk_cases(gpu, shape):
        check_prefill(case, BF16_TOLERANCE)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "shape",
    slow_but([BF16_SHAPES[i] for i in (0, 2, 6, 10, 12)], [BF16_SHAPES[6]]),
    ids=str,
)
def test_chunks_of_small_steps_are_dense_attention(shape: Shape) -> None:
    for case in chunk_cases(gpu, shape):
        check_prefill(case, BF16_TOLERANCE)


@pytest.mark.kernels
def test_a_row_has_the_same_bits_whatever_its_neighbours() -> None:
    check_that_neighbours_change_no_bit(gpu, BF16_SHAPES[0])


@pytest.mark.kernels
@pytest.mark.parametrize("max_row_tokens", slow_but((5, 32), (5,)))
def test_chunks_of_a_few_tokens_have_tiles_of_a_few(max_row_tokens: int) -> None:
    check_tiles_of_few_tokens(gpu, BF16_SHAPES[0], max_row_tokens, BF16_TOLERANCE)


@pytest.mark.kernels
def test_nan_in_a_row_is_seen_by_that_row() -> None:
    check_that_nan_is_seen(gpu, BF16_SHAPES[0])


@pytest.mark.kernels
def test_lse_is_for_those_who_ask() -> None:
    check_that_lse_is_for_those_who_ask(gpu, BF16_SHAPES[0])


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
        check_decode(Case(gpu, shape, *sizes, order=order), BF16_TOLERANCE)

    check()


@pytest.mark.kernels
@pytest.mark.random_kernels
@pytest.mark.timeout(3600)
@every_shape
@pytest.mark.parametrize("small_step", [0, 16])
def test_random_chunks(shape: Shape, small_step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SMALL_STEP", small_step)

    @many_examples
    @given(chunks(shape), st.integers(0, 2**32 - 1))
    def check(sizes: tuple[list[int], list[int]], order: int) -> None:
        check_prefill(Case(gpu, shape, *sizes, order=order), BF16_TOLERANCE)

    check()
