"""Both forms of the quantized product in plain XLA are right against float64."""

import jax
import numpy as np
import pytest

from jaxserve.pallas_kernels.quantized_matmul import reference
from jaxserve.pallas_kernels.quantized_matmul.api import GROUPS
from tests.pallas_kernels.quantized_case import BF16, Shape, check

EXACT = 2**-20
ROUNDED = 2**-9


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("columns", [(24,), (2, 3, 8)], ids=str)
def test_rows_times_a_weight_in_int4(group: int, columns: tuple[int, ...]) -> None:
    for rows in (2, group // 2, group // 2 + 1, 100):
        check(reference, Shape(rows, 2 * group, columns, group, np.float32), EXACT)
        by_group = 2 * rows <= group
        check(
            reference, Shape(rows, 2 * group, columns, group, BF16), EXACT if by_group else ROUNDED
        )


def test_in_a_program_whose_types_are_64_bits_wide() -> None:
    with jax.enable_x64(True):
        check(reference, Shape(4, 64, (24,), 32, np.float32), EXACT)
