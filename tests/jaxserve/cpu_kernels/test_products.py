"""Products of the kernel for a CPU against NumPy's float64, and int8 ones against int64."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.cpu_kernels import library, processor
from jaxserve.cpu_kernels.processor import Processor
from jaxserve.cpu_kernels.products import (
    MAX_ROWS,
    MAX_ROWS_BESIDE_AMX,
    CpuProduct,
    MaxRows,
    multiply,
)
from tests.jaxserve import cpu_kernel

SIZES = (1, 3, 63, 64, 65, 100, 896)  # of K and N, in pairs
ROWS = (1, 2, 3, 4, 5, 16, 17)
SHARED = 896  # K and N of a product that several threads share
FLOATS = ("bfloat16", "float32")

Operands = tuple[np.ndarray, np.ndarray]  # rows, and a weight


@pytest.fixture(params=library.INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest) -> str:
    """Each set of instructions that the processor has."""
    return cpu_kernel.instructions(request.param)


def products(instructions: str, *operands: Operands) -> list[np.ndarray]:
    """Multiply all pairs of rows and weight in one program: each one takes its time to compile."""
    step = jax.jit(lambda pairs: [multiply(x, weight, instructions) for x, weight in pairs])
    return [np.asarray(result) for result in step(operands)]


def draw(numbers: str, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Draw numbers; int8 ones use their whole range."""
    rng = np.random.default_rng([seed, *shape])
    if numbers == "int8":
        return rng.integers(-128, 128, shape).astype(np.int8)
    return rng.normal(size=shape).astype(np.float32).astype(jnp.dtype(numbers))


def check_against_wider_numbers(found: np.ndarray, x: np.ndarray, weight: np.ndarray) -> None:
    """Compare exactly for int8; else within what K additions in float32 may be wrong by."""
    if x.dtype == np.int8:
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, x.astype(np.int64) @ weight.astype(np.int64).T)
        return
    wide = x.astype(np.float64), weight.astype(np.float64).T
    allowed = 1e-6 * (np.abs(wide[0]) @ np.abs(wide[1]))
    assert found.dtype == np.float32
    assert (np.abs(found - wide[0] @ wide[1]) <= allowed).all()


@pytest.mark.parametrize("numbers", library.NUMBERS)
def test_any_sizes(instructions: str, numbers: str) -> None:
    """Every K with some N, and the other way round."""
    sizes = [
        (SIZES[at], SIZES[other]) for at in range(len(SIZES)) for other in (at, at - 1, -1 - at)
    ]
    pairs = [
        (draw(numbers, (rows, depth)), draw(numbers, (outputs, depth), 1))
        for rows, (depth, outputs) in product(ROWS, sorted(set(sizes)))
    ]
    for (x, weight), found in zip(pairs, products(instructions, *pairs), strict=True):
        check_against_wider_numbers(found, x, weight)


@pytest.mark.parametrize("numbers", library.NUMBERS)
def test_sizes_of_zero(instructions: str, numbers: str) -> None:
    sizes = [(0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0)]
    pairs = [(draw(numbers, (r, k)), draw(numbers, (n, k))) for r, n, k in sizes]
    for (rows, outputs, _), found in zip(sizes, products(instructions, *pairs), strict=True):
        assert found.shape == (rows, outputs)
        assert not found.any()


@pytest.mark.parametrize("numbers", library.NUMBERS)
@pytest.mark.parametrize("size", [100, SHARED])
def test_results_do_not_depend_on_the_batch(instructions: str, numbers: str, size: int) -> None:
    x = draw(numbers, (17, size))
    weight = draw(numbers, (size, size), 1)
    counts = (2, 3, 4, 5, 6, 7, 17)
    alone = np.concatenate(products(instructions, *[(row[None], weight) for row in x]))
    together = products(instructions, *[(x[:rows], weight) for rows in counts])
    for rows, found in zip(counts, together, strict=True):
        np.testing.assert_array_equal(found, alone[:rows])


@pytest.mark.parametrize("numbers", library.NUMBERS)
def test_results_do_not_depend_on_where_an_output_stands(instructions: str, numbers: str) -> None:
    """Outputs of whole blocks and the last ones, which have none."""
    x = draw(numbers, (3, 100))
    weight = draw(numbers, (23, 100), 1)
    whole, *parts = products(instructions, *[(x, weight[first:]) for first in range(7)])
    for first, found in enumerate(parts, 1):
        np.testing.assert_array_equal(found, whole[:, first:])


@pytest.mark.parametrize("numbers", library.NUMBERS)
def test_calls_at_the_same_time(instructions: str, numbers: str) -> None:
    """More callers than XLA has threads, each with a product that is shared among them."""
    step = jax.jit(partial(multiply, instructions=instructions))
    weight = jnp.asarray(draw(numbers, (SHARED, SHARED), 1))
    rows = [jnp.asarray(draw(numbers, (3, SHARED), seed)) for seed in range(16)]
    expected = [np.asarray(step(x, weight)) for x in rows]

    def call_often(at: int) -> None:
        for _ in range(10):
            np.testing.assert_array_equal(np.asarray(step(rows[at], weight)), expected[at])

    with ThreadPoolExecutor(16) as callers:
        list(callers.map(call_often, range(16)))


def test_the_largest_int8_numbers(instructions: str) -> None:
    """Up to the K from which the sum itself could exceed int32."""
    cases = list(product((-128, 127), (-128, 127), (65, 2**17 - 1)))
    pairs = [
        (np.full((2, depth), number, np.int8), np.full((5, depth), weight, np.int8))
        for number, weight, depth in cases
    ]
    found = products(instructions, *pairs)
    for (number, weight, depth), result in zip(cases, found, strict=True):
        np.testing.assert_array_equal(result, np.full((2, 5), depth * number * weight))


@pytest.mark.parametrize("numbers", FLOATS)
def test_a_row_that_is_not_finite_stays_alone(instructions: str, numbers: str) -> None:
    x = draw(numbers, (5, 100))
    weight = draw(numbers, (9, 100), 1)
    spoilt = []
    for bad, at in product((np.nan, np.inf, -np.inf), (0, 99)):  # a whole step, and the last one
        rows = x.copy()
        rows[2, at] = bad
        spoilt.append((rows, weight))
    good, *found = products(instructions, (x, weight), *spoilt)
    for result in found:
        assert not np.isfinite(result[2]).any()
        np.testing.assert_array_equal(np.delete(result, 2, 0), np.delete(good, 2, 0))


@pytest.mark.parametrize("numbers", FLOATS)
def test_a_weight_that_is_not_finite_spoils_its_output_alone(
    instructions: str, numbers: str
) -> None:
    x = draw(numbers, (5, 100))
    weight = draw(numbers, (9, 100), 1)
    outputs = (1, 8)  # of a whole block, and the last one
    spoilt = []
    for output in outputs:
        other = weight.copy()
        other[output] = np.nan
        spoilt.append((x, other))
    good, *found = products(instructions, (x, weight), *spoilt)
    for output, result in zip(outputs, found, strict=True):
        assert np.isnan(result[:, output]).all()
        np.testing.assert_array_equal(np.delete(result, output, 1), np.delete(good, output, 1))


@pytest.mark.parametrize("numbers", FLOATS)
def test_subnormal_numbers_count_as_zero(instructions: str, numbers: str) -> None:
    """On whichever thread."""
    pairs = []
    for size in (100, SHARED):
        x = np.full((2, size), 1e-39, np.float32).astype(jnp.dtype(numbers))
        assert x.astype(np.float64).all()
        pairs.append((x, np.full((size, size), 1e20, np.float32).astype(jnp.dtype(numbers))))
    for found in products(instructions, *pairs):
        assert not found.any()


def test_a_step_with_several_products(instructions: str) -> None:
    """Among operations of XLA, on more than one device."""

    def step(x: jax.Array, weight: jax.Array) -> jax.Array:
        return multiply(jnp.tanh(multiply(x, weight, instructions)), weight, instructions)

    x = draw("float32", (3, 65))
    weight = draw("float32", (65, 65), 1)
    inner = np.tanh(x.astype(np.float64) @ weight.T)
    for device in jax.devices()[:2]:
        found = jax.jit(step)(*jax.device_put((x, weight), device))
        np.testing.assert_allclose(np.asarray(found), inner @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"),
    [("float16", "float16"), ("float32", "bfloat16"), ("int8", "float32"), ("int32", "int32")],
)
def test_numbers_that_the_kernel_does_not_multiply(
    instructions: str, x_dtype: str, weight_dtype: str
) -> None:
    x = jnp.zeros((2, 4), x_dtype)
    weight = jnp.zeros((3, 4), weight_dtype)
    with pytest.raises(TypeError, match=f"x is {x_dtype} and the weight {weight_dtype}; both"):
        multiply(x, weight, instructions)


@pytest.mark.parametrize(
    ("x_shape", "weight_shape"), [((2, 4), (3, 5)), ((4,), (3, 4)), ((2, 4), (1, 3, 4))]
)
def test_shapes_that_do_not_agree(
    instructions: str, x_shape: tuple[int, ...], weight_shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"they have to be \[R, K\] and \[N, K\]"):
        multiply(jnp.zeros(x_shape), jnp.zeros(weight_shape), instructions)


@pytest.mark.usefixtures("instructions")
def test_instructions_that_there_are_not() -> None:
    with pytest.raises(ValueError, match=r"instructions is 'neon'; this processor has .*avx2"):
        multiply(jnp.zeros((2, 4)), jnp.zeros((3, 4)), "neon")


@pytest.mark.parametrize("shapes", [((2, 4), (3, 5), (2, 3)), ((2, 4), (3, 4), (2, 4))])
def test_the_library_itself_refuses_shapes_that_do_not_agree(
    instructions: str, shapes: tuple[tuple[int, int], ...]
) -> None:
    """Whoever calls it without `multiply` gets no memory of others."""
    x, weight, result = shapes
    name = library.target_name("float32", instructions)
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(result, jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"not \[2, 4\] and \[3, [45]\] to \[2"):
        jax.block_until_ready(jax.jit(call)(jnp.zeros(x), jnp.zeros(weight)))


def test_the_most_rows_are_known_for_all_instructions_and_numbers() -> None:
    assert set(MAX_ROWS) == set(library.INSTRUCTIONS)
    assert set(MaxRows._fields) == set(library.NUMBERS)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [({"avx512f", "amx_tile"}, MAX_ROWS_BESIDE_AMX), ({"avx512f"}, MAX_ROWS["avx512"])],
)
def test_beside_amx_the_kernel_multiplies_fewer_rows(
    flags: set[str], expected: MaxRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Processor("a processor", frozenset(flags), cores=2)
    monkeypatch.setattr("jaxserve.cpu_kernels.products.processor", lambda: found)
    assert CpuProduct.of("avx512").max_rows == expected
    assert CpuProduct.of("avx2").max_rows == MAX_ROWS["avx2"]


def test_the_processor_is_read_from_its_description(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description = tmp_path / "cpuinfo"
    description.write_text(
        "processor\t: 0\nmodel name\t: A CPU: fast\nflags\t\t: fpu amx_tile\n\nprocessor\t: 1\n"
    )
    monkeypatch.setattr(processor, "DESCRIPTION", description)
    found = processor.processor.__wrapped__()
    assert found.name.split() == ["A", "CPU:", "fast"]
    assert found.has_amx
    monkeypatch.setattr(processor, "DESCRIPTION", tmp_path / "none")
    assert not processor.processor.__wrapped__().has_amx
