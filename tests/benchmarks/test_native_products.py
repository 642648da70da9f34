"""The prototype of a kernel for a CPU multiplies right, for every number of rows that it treats."""

import shutil
from pathlib import Path

import pytest

from benchmarks.native_products.__main__ import NUMBERS, build, check, forms, missing_extensions


@pytest.fixture(scope="module", autouse=True)
def products(tmp_path_factory: pytest.TempPathFactory) -> None:
    if shutil.which("g++") is None or missing_extensions():
        pytest.skip("needs g++ and AVX-512 with VNNI and bfloat16")
    build(Path(tmp_path_factory.mktemp("products")))


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("rows", [1, 4, 7])
def test_products_are_those_of_float64(numbers: str, rows: int) -> None:
    for form in forms(numbers):
        check(form, numbers, rows)
