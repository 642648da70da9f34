"""The forms of a product on a CPU that are measured multiply right."""

import pytest

from benchmarks.cpu_products import NUMBERS, check, forms
from jaxserve.cpu_kernels.errors import CpuKernelError
from jaxserve.cpu_kernels.library import load


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    try:
        load()
    except CpuKernelError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("rows", [1, 4, 7])
def test_products_are_those_of_float64(numbers: str, rows: int) -> None:
    for form in forms(numbers):
        check(form, numbers, rows)
