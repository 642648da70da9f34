"""The attention kernel for a CPU keeps the contract: dense attention, whatever the neighbours."""

from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.cpu_kernels.errors import CpuKernelError
from jaxserve.cpu_kernels.library import INSTRUCTIONS
from jaxserve.pallas_kernels.paged_attention import cpu, reference
from jaxserve.pallas_kernels.paged_attention.api import (
    Demand,
    KernelError,
    Layout,
    Options,
    PagedAttention,
    Pages,
    Ragged,
    quantize,
)
from tests.jaxserve.cpu_kernel import instructions
from tests.pallas_kernels.attention_case import (
    BF16,
    BF16_SHAPES,
    BF16_TOLERANCE,
    FP8,
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

FLOAT32_SHAPES = [*SHAPES, Shape(4, 2, 64, 16, 9, stored=ml_dtypes.bfloat16)]
ALL_SHAPES = [*FLOAT32_SHAPES, *BF16_SHAPES]
# With a window, a soft cap and sinks, 8 bits, and one of latent pages.
FEW_SHAPES = [SHAPES[2], SHAPES[9], BF16_SHAPES[2], BF16_SHAPES[6], SHAPES[14], BF16_SHAPES[-1]]
# Latent pages of an odd number of heads, and float8.
TWO_MORE = [SHAPES[12], next(shape for shape in BF16_SHAPES if shape.stored is FP8)]
# Pages of one token and of a number that is no power of two.
QUICK_SHAPES = [*FEW_SHAPES, *TWO_MORE, SHAPES[0], SHAPES[4]]
# With dense attention in float64 beside them, chunks take longest.
QUICK_PROMPTS = [*FEW_SHAPES, *TWO_MORE]
few_examples = partial(settings, deadline=None, derandomize=True, database=None, max_examples=6)


@pytest.fixture(params=INSTRUCTIONS, scope="module")
def attention(request: pytest.FixtureRequest) -> PagedAttention:
    """The implementation with each set of instructions that the processor has."""
    asked = instructions(request.param)
    module = ModuleType(asked)
    vars(module).update(vars(cpu))
    vars(module)["attend"] = partial(cpu.attend, instructions=asked)
    return cast(PagedAttention, module)


def tolerance(shape: Shape) -> float:
    """Return what rounding allows; keys of bfloat16 pages are rounded, whoever reads them."""
    if shape.dtype is BF16 or shape.stored is BF16:
        return BF16_TOLERANCE
    return TOLERANCE


@pytest.mark.parametrize("shape", slow_but(ALL_SHAPES, QUICK_SHAPES), ids=str)
def test_decode_is_dense_attention(attention: PagedAttention, shape: Shape) -> None:
    @few_examples()
    @given(decodes(shape), st.integers(0, 2**32 - 1))
    def check(sizes: tuple[list[int], list[int]], order: int) -> None:
        check_decode(Case(attention, shape, *sizes, order=order), tolerance(shape))

    check()


@pytest.mark.parametrize("shape", slow_but(ALL_SHAPES, QUICK_PROMPTS), ids=str)
def test_prefill_is_dense_attention(attention: PagedAttention, shape: Shape) -> None:
    @few_examples()
    @given(chunks(shape), st.integers(0, 2**32 - 1))
    def check(sizes: tuple[list[int], list[int]], order: int) -> None:
        check_prefill(Case(attention, shape, *sizes, order=order), tolerance(shape))

    check()


@pytest.mark.parametrize("shape", slow_but(FEW_SHAPES, FEW_SHAPES[::2]), ids=str)
def test_a_row_has_the_same_bits_whatever_its_neighbours(
    attention: PagedAttention, shape: Shape
) -> None:
    check_that_no_neighbour_changes_a_bit(attention, shape)


@pytest.mark.parametrize("shape", FEW_SHAPES[:4], ids=str)
def test_a_query_has_the_same_bits_in_every_step(attention: PagedAttention, shape: Shape) -> None:
    """A token that is decoded has the bits that it has among the tokens of its prompt."""
    length = shape.context
    whole = Case(attention, shape, [length - 70, 0, 0, 0, 0], [70, 0, 0, 0, 0]).run_prefill()
    few = Case(attention, shape, [length - 3, 0, 0, 0, 0], [3, 0, 0, 0, 0]).run_prefill()
    one = Case(attention, shape, [length - 1, 0, 0, 0, 0], [1, 0, 0, 0, 0]).run_decode()
    for step, prefill, decoded in zip(whole, few, one, strict=True):
        np.testing.assert_array_equal(step[0][-3:], prefill[0])
        np.testing.assert_array_equal(step[0][-1], decoded[0])


def test_in_a_program_whose_types_are_64_bits_wide(attention: PagedAttention) -> None:
    with jax.enable_x64(True):
        case = Case(attention, SHAPES[2], [1, 9, 0, 4, 2], [1, 1, 1, 1, 1])
        check_decode(case, TOLERANCE)


def test_nan_in_a_row_is_seen_by_that_row(attention: PagedAttention) -> None:
    for shape in (SHAPES[2], BF16_SHAPES[0]):
        case = Case(attention, shape, [40, 3, 0, 0, 0], [1, 1, 0, 0, 0], poisoned=[0])
        out, lse = case.run_decode()
        assert np.isnan(out[0].astype(np.float32)).all() and np.isnan(lse[0]).all()
        assert np.isfinite(out[1].astype(np.float32)).all()


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000])
def test_no_nan_of_a_scale_is_lost(attention: PagedAttention, bits: int) -> None:
    """Rounding a weight to bfloat16 does not carry a NaN over into a number."""
    layout = Layout(1, 16, 64, jnp.dtype(np.int8))
    pages = cpu.allocate(1, layout)
    scale = np.ones((1, 1, 64), np.float32)
    scale[0, 0, 1] = np.uint32(bits).view(np.float32)
    pages = pages._replace(k_scale=jnp.ones_like(scale), v_scale=jnp.asarray(scale))
    ragged = Ragged(
        jnp.zeros((1, 1), jnp.int32),
        jnp.array([2]),
        jnp.array([0, 1]),
        jnp.array([1, 1]),
        jnp.array([1]),  # nothing is written
        jnp.array([0]),
    )
    q = jnp.ones((1, 1, 16), BF16)
    options = Options(layout, 1.0, max_row_tokens=1)
    found = jax.jit(partial(attention.attend, options=options))(q, q, q, pages, ragged)
    assert np.isnan(np.asarray(found.out, np.float32)).all()


def test_lse_is_for_those_who_ask(attention: PagedAttention) -> None:
    shape = SHAPES[2]
    case = Case(attention, shape, [40, 3, 0, 0, 0], [1, 1, 1, 0, 0])
    plain = replace(shape.options(decode=True), lse=False)
    assert case.run(ROWS, decode=True).lse is not None
    assert case.run(ROWS, decode=True, options=plain).lse is None


def test_every_number_of_float8(attention: PagedAttention) -> None:
    """A row whose values are all numbers of float8_e4m3fn, subnormal ones and NaN too.

    One position for each: its weight is 1, so the result is the value.
    """
    numbers = np.arange(256, dtype=np.uint8).view(FP8)
    values = np.repeat(numbers[:, None], 8, 1)[:, None, None]  # [P, 1, 1, 8]
    keys = np.zeros_like(values)
    scales = np.ones((256, 1, 1), np.float32)
    ragged = Ragged(
        tables=jnp.arange(256, dtype=jnp.int32)[:, None],
        lengths=jnp.ones(256, jnp.int32),
        starts=jnp.arange(257),
        split=jnp.array([256, 256]),
        page=jnp.full(256, 256),  # nothing is written
        offset=jnp.zeros(256, jnp.int32),
    )
    options = Options(Layout(1, 8, 1, jnp.dtype(FP8)), 1.0, max_row_tokens=1)
    canonical = Pages(*(jnp.asarray(x) for x in (keys, values, scales, scales)))
    layout = Layout(1, 8, 1, jnp.dtype(FP8))
    pages = cpu.write_back(cpu.allocate(256, layout), jnp.arange(256), canonical, layout)
    q = jnp.zeros((256, 1, 8))
    found = jax.jit(partial(attention.attend, options=options))(q, q, q, pages, ragged).out
    np.testing.assert_array_equal(found[:, 0, 0], numbers.astype(np.float32))


@pytest.mark.parametrize("stored", [np.float32, np.int8], ids=str)
def test_far_scores(attention: PagedAttention, stored: type) -> None:
    """Scores up to thousands apart: the softmax neither overflows nor loses its largest one."""
    length = 200
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, length, 1, 16)).astype(np.float32)
    q = (1000 * rng.normal(size=(1, 1, 16))).astype(np.float32)
    pages = reference.allocate(4, Layout(1, 16, 64, jnp.dtype(stored)))
    at = np.arange(length)
    pages = reference.write(pages, jnp.asarray(k), jnp.asarray(v), at // 64, at % 64)
    ragged = Ragged(
        jnp.arange(4)[None],
        jnp.array([length]),
        jnp.array([0, 1]),
        jnp.array([1, 1]),
        jnp.array([4]),
        jnp.array([0]),
    )
    options = Options(Layout(1, 16, 64, jnp.dtype(stored)), 1.0, max_row_tokens=1, lse=True)
    found = attention.attend(q, k[:1], v[:1], pages, ragged, options)
    if stored is np.int8:
        k, v = (
            np.asarray(numbers, np.float64) * np.asarray(scale)[..., None]
            for numbers, scale in (quantize(x, jnp.dtype(stored)) for x in (k, v))
        )
    scores = k[:, 0].astype(np.float64) @ q[0, 0].astype(np.float64)
    weights = np.exp(scores - scores.max())
    np.testing.assert_allclose(found.out[0, 0], weights @ v[:, 0] / weights.sum(), atol=1e-3)
    assert found.lse is not None
    np.testing.assert_allclose(found.lse[0, 0], scores.max() + np.log(weights.sum()), rtol=1e-5)


def test_a_context_of_128k_tokens(attention: PagedAttention) -> None:
    check_a_context_of_128k_tokens(attention)


@pytest.mark.parametrize("stored", [np.float32, BF16, np.int8, FP8], ids=str)
def test_pages_are_not_copied(attention: PagedAttention, stored: type) -> None:
    """Tokens are stored in place, also by several steps in a loop and in pages of one lane."""
    dtype = BF16 if stored is BF16 else np.float32
    shape = Shape(4, 2, 64, 16, 9, dtype=dtype, stored=stored)
    options = shape.options(decode=True)
    pages = jax.eval_shape(
        lambda: jax.tree.map(lambda x: x[None], attention.allocate(4096, shape.layout))
    )
    new = [jax.ShapeDtypeStruct((2, heads, 64), dtype) for heads in (4, 2, 2)]
    shapes = (2, 9), (2,), (3,), (2,), (2,), (2,)
    ragged = Ragged(*(jax.ShapeDtypeStruct(each, np.int32) for each in shapes))

    def steps(
        q: jax.Array, k: jax.Array, v: jax.Array, pages: Pages, ragged: Ragged
    ) -> tuple[jax.Array, Pages]:
        def step(_: int, before: tuple[jax.Array, Pages]) -> tuple[jax.Array, Pages]:
            q, pages = before
            lane = jax.tree.map(lambda x: x[0], pages)
            found = attention.attend(q, k, v, lane, ragged, options)
            return found.out, jax.tree.map(lambda x: x[None], found.pages)

        return jax.lax.fori_loop(0, 3, step, (q, pages))

    compiled = jax.jit(steps, donate_argnums=3).lower(*new, pages, ragged).compile()
    memory = compiled.memory_analysis()
    pool = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages))
    assert memory.alias_size_in_bytes == pool
    assert memory.temp_size_in_bytes < pool / 100


# ---- what cannot be


def demand(dtype: type = np.float32) -> Demand:
    return Demand(4, 4, 10, jnp.dtype(dtype), "cpu")


def test_heads_that_do_not_divide_are_refused() -> None:
    options = Options(Layout(3, 64, 16, jnp.dtype(np.float32)), 1.0)
    with pytest.raises(KernelError, match="4 query heads do not divide by 3 kv heads"):
        cpu.check(options, demand())


@pytest.mark.parametrize(
    ("queries", "stored"), [(BF16, np.float32), (np.float16, np.float16), (np.float32, np.float16)]
)
def test_other_numbers_are_refused(queries: type, stored: type) -> None:
    options = Options(Layout(2, 64, 16, jnp.dtype(stored)), 1.0)
    with pytest.raises(KernelError, match=r"queries of .* and pages of .*--attention reference"):
        cpu.check(options, demand(queries))


def test_odd_heads_in_bfloat16_are_refused() -> None:
    options = Options(Layout(2, 63, 16, jnp.dtype(BF16)), 1.0)
    with pytest.raises(KernelError, match=r"heads of 63: .* even .*--attention reference"):
        cpu.check(options, demand(BF16))


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise CpuKernelError("the kernels for a CPU were not built; install them")

    monkeypatch.setattr(cpu, "load", fail)
    options = Options(Layout(2, 64, 16, jnp.dtype(np.float32)), 1.0)
    with pytest.raises(KernelError, match=r"not built; install .* \(or --attention reference\)"):
        cpu.check(options, demand())


def test_instructions_that_the_processor_lacks(attention: PagedAttention) -> None:
    del attention  # which skips where there is no library
    options = SHAPES[2].options(decode=True)
    arguments = [jnp.zeros((ROWS, heads, 16)) for heads in (8, 2, 2)]
    pages = cpu.allocate(9, SHAPES[2].layout)
    ragged = Ragged(*(jnp.zeros(s, jnp.int32) for s in ((ROWS, 9), ROWS, ROWS + 1, 2, ROWS, ROWS)))
    with pytest.raises(ValueError, match="instructions is 'sse2'"):
        cpu.attend(*arguments, pages, ragged, options, instructions="sse2")
