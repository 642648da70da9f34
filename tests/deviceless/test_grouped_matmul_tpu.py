"""The grouped product alone, as the compilers for TPUs build it.

No weight is copied, and nothing large is allocated beside.

Run by `make deviceless`, in an environment that has these compilers; skipped in any other.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from _pytest.mark.structures import ParameterSet

from jaxserve.pallas_kernels.grouped_matmul import tpu
from jaxserve.plan.hlo.inspection import find_copies, parse
from jaxserve.sharding.chips import CHIPS
from tests.deviceless.grouped_product import MODELS, PRODUCTS, QUANTIZED, Product, compile_for
from tests.deviceless.pallas_calls import pallas_calls

TPUS = [name for name, chip in CHIPS.items() if chip.platform == "tpu"]
EXACT = [replace(product, dtype="float32") for product in PRODUCTS if product.tokens == 64]
QUICK = [Product(MODELS[1], 64, up=True), Product(MODELS[2], 64, up=False)]
QUICK += [
    Product(MODELS[0], 64, up=True, weights="int8"),
    Product(MODELS[3], 2048, up=False, weights="int4-g128"),
]


def cases() -> Iterator[ParameterSet]:
    for product in [*PRODUCTS, *EXACT, *QUANTIZED]:
        for chip in TPUS:
            marks = [] if product in QUICK else [pytest.mark.slow]
            yield pytest.param(chip, product, marks=marks, id=f"{chip}-{product}")


@pytest.mark.deviceless
@pytest.mark.parametrize(("chip", "product"), list(cases()))
def test_no_weight_is_copied(chip: str, product: Product) -> None:
    compiled, _, demand = compile_for(tpu, chip, product)
    module = parse(compiled.as_text() or "")
    memory = compiled.memory_analysis()
    assert memory is not None
    result = demand.rows * demand.parts * -(-demand.columns // 128) * 128 * demand.dtype.itemsize
    assert memory.temp_size_in_bytes < result + 2**22
    assert pallas_calls(module) == {"grouped_matmul": 1}
    assert not find_copies(
        module, set(), {demand.experts * demand.parts * demand.contracted * demand.columns}
    )
