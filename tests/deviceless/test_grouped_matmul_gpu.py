"""The grouped product alone, as the compiler for an H200 builds it.

No weight is copied, and registers suffice.

Run by `make deviceless`, in an environment that has these compilers; skipped in any other.
"""

import re
from collections.abc import Iterator

import pytest
from _pytest.mark.structures import ParameterSet

from jaxserve.pallas_kernels.grouped_matmul import gpu, reference
from jaxserve.plan.hlo.inspection import find_copies, parse
from tests.deviceless.grouped_product import MODELS, PRODUCTS, QUANTIZED, Product, compile_for
from tests.deviceless.pallas_calls import pallas_calls

QUICK = [Product(MODELS[1], 64, up=True), Product(MODELS[2], 2048, up=False)]
QUICK += [Product(MODELS[1], 64, up=True, weights="int8")]
TAKEN = [product for product in QUANTIZED if product.weights in ("int8", "fp8")]
SPILLED = re.compile(r"(\d+) bytes spill stores")


def cases() -> Iterator[ParameterSet]:
    for product in [*PRODUCTS, *TAKEN]:
        yield pytest.param(
            product, marks=[] if product in QUICK else [pytest.mark.slow], id=str(product)
        )


@pytest.mark.deviceless
@pytest.mark.parametrize("product", list(cases()))
def test_no_weight_is_copied_and_no_register_spilt(
    product: Product, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled, _, demand = compile_for(gpu, "h200", product)
    module = parse(compiled.as_text() or "")
    memory = compiled.memory_analysis()
    assert memory is not None
    result = demand.rows * demand.parts * demand.columns * demand.dtype.itemsize
    assert memory.temp_size_in_bytes < result + 2**20
    assert pallas_calls(module) == {"grouped_matmul": 1}
    assert not find_copies(
        module, set(), {demand.experts * demand.parts * demand.contracted * demand.columns}
    )
    report = "".join(capfd.readouterr())
    spilled = [int(found) for found in SPILLED.findall(report)]
    assert spilled or product != QUICK[0], (
        "the assembler's report; a kernel that was compiled before has none"
    )
    assert max(spilled, default=0) == 0 and "serialized" not in report


@pytest.mark.deviceless
@pytest.mark.slow
@pytest.mark.parametrize("product", [*PRODUCTS, *QUANTIZED], ids=str)
def test_the_reference_needs_one_experts_weight(product: Product) -> None:
    """Temporaries are one expert's weight and both parts of the result."""
    compiled, _, demand = compile_for(reference, "h200", product)
    memory = compiled.memory_analysis()
    assert memory is not None
    rows = demand.rows * demand.parts * demand.columns
    weight = demand.parts * demand.contracted * demand.columns
    assert memory.temp_size_in_bytes < (rows + weight) * demand.dtype.itemsize + 2**24
    everything = {demand.experts * weight}
    assert not find_copies(parse(compiled.as_text() or ""), set(), everything)
