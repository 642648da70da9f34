"""The quantized product alone, as the compiler for an H200 builds it.

Weights are read in the form in which they are stored, and registers suffice.

Run by `make deviceless`, in an environment that has these compilers; skipped in any other.
"""

import math
from collections.abc import Iterator

import pytest
from _pytest.mark.structures import ParameterSet

from jaxserve.pallas_kernels.quantized_matmul import gpu
from jaxserve.pallas_kernels.quantized_matmul.gpu_plan import plan_of
from jaxserve.plan.hlo.inspection import find_copies, parse
from tests.deviceless.pallas_calls import pallas_calls
from tests.deviceless.quantized_weight import PRODUCTS, Product, compile_for
from tests.deviceless.test_grouped_matmul_gpu import SPILLED

QUICK = {"8b-gate_up-g128-64", "20b-qkv-g32-1536"}
SPILT = 8  # bytes that a thread may spill; tall tiles with groups of 32 spill 4


def cases() -> Iterator[ParameterSet]:
    for product in PRODUCTS:
        marks = [] if str(product) in QUICK else [pytest.mark.slow]
        yield pytest.param(product, marks=marks, id=str(product))


@pytest.mark.deviceless
@pytest.mark.parametrize("product", list(cases()))
def test_no_weight_is_widened_and_registers_suffice(
    product: Product, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled = compile_for(gpu, "h200", product)
    module = parse(compiled.as_text() or "")
    memory = compiled.memory_analysis()
    assert memory is not None
    contracted = product.shape[0]
    columns = math.prod(product.shape[1:])
    splits = plan_of(product.rows, contracted, columns, product.group, "NVIDIA H200").splits
    rows = product.rows + 32
    assert memory.temp_size_in_bytes < splits * rows * columns * 4 + 2 * rows * contracted + 2**20
    assert pallas_calls(module) == {"quantized_matmul": 1}
    assert not find_copies(module, set(), {contracted * columns})
    report = "".join(capfd.readouterr())
    spilled = [int(found) for found in SPILLED.findall(report)]
    assert spilled or str(product) not in QUICK, (
        "the assembler's report; a kernel that was compiled before has none"
    )
    assert max(spilled, default=0) <= SPILT and "serialized" not in report
