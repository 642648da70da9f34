"""The quantized product alone, as the compilers for TPUs build it.

Weights are read in the form in which they are stored.

Run by `make deviceless`, in an environment that has these compilers; skipped in any other.
"""

import math
from collections.abc import Iterator

import pytest
from _pytest.mark.structures import ParameterSet

from jaxserve.pallas_kernels.quantized_matmul import tpu
from jaxserve.plan.hlo.inspection import find_copies, parse
from jaxserve.sharding.chips import CHIPS
from tests.deviceless.pallas_calls import pallas_calls
from tests.deviceless.quantized_weight import PRODUCTS, Product, compile_for

TPUS = [name for name, chip in CHIPS.items() if chip.platform == "tpu"]
QUICK = "8b-qkv-g128-64"


def cases() -> Iterator[ParameterSet]:
    for product in PRODUCTS:
        for chip in TPUS:
            marks = [] if str(product) == QUICK else [pytest.mark.slow]
            yield pytest.param(chip, product, marks=marks, id=f"{chip}-{product}")


@pytest.mark.deviceless
@pytest.mark.parametrize(("chip", "product"), list(cases()))
def test_no_weight_is_widened(chip: str, product: Product) -> None:
    compiled = compile_for(tpu, chip, product)
    module = parse(compiled.as_text() or "")
    memory = compiled.memory_analysis()
    assert memory is not None
    contracted = product.shape[0]
    columns = math.prod(product.shape[1:])
    assert memory.temp_size_in_bytes < 2 * (product.rows + 8) * columns * 4 + 2**20
    assert pallas_calls(module) == {"quantized_matmul": 1}
    assert not find_copies(module, set(), {contracted * columns})
