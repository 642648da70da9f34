"""The forms of a product on a CPU that are measured multiply right."""

from itertools import product

import pytest

from benchmarks.cpu_products import NUMBERS, check, forms
from jaxserve.cpu_kernels.errors import CpuKernelError
from jaxserve.cpu_kernels.library import load
from tests.slow_cases import slow_but


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    try:
        load()
    except CpuKernelError as error:
        pytest.skip(str(error))


CASES = list(product(NUMBERS, (1, 4, 7)))


@pytest.mark.parametrize(
    "case", slow_but(CASES, CASES[::4]), ids=lambda case: f"{case[0]}-{case[1]}"
)
def test_products_are_those_of_float64(case: tuple[str, int]) -> None:
    numbers, rows = case
    for form in forms(numbers):
        check(form, numbers, rows)
