"""Reads and writes of pages for KV transfer, as real compilers build them.

Pages are updated in place, and no pool is copied.
"""

from dataclasses import replace

import pytest

from jaxserve.engine.device.lowering import Lowering
from jaxserve.engine.device.memory import bytes_per_device
from jaxserve.models.layer_kind import Latent, LayerKind
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.hlo.inspection import inspect
from tests.deviceless.test_steps import OPTIONS, SPEC, lowering

LATENT = replace(
    SPEC,
    num_heads=16,
    num_kv_heads=1,
    head_dim=192,
    layers=(LayerKind(latent=Latent(None, 512, head=128, rotated=64, value=128)),)
    * SPEC.num_layers,
)
CHIPS = [("v5e", 2), ("v6e", 1), ("h200", 1)]


def exchange_lowering(chip: str, tensor: int, spec: ModelSpec, kv: str) -> Lowering:
    options = replace(
        OPTIONS, page_exchange=True, kv=kv, page_size=128 if kv in ("int8", "fp8") else 64
    )
    return lowering(chip, tensor, spec=spec, options=options)


@pytest.mark.deviceless
@pytest.mark.parametrize("kv", ["bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("spec", [SPEC, LATENT], ids=["k and v", "latent"])
@pytest.mark.parametrize(("chip", "tensor"), CHIPS, ids=str)
def test_no_copy_of_a_pool(chip: str, tensor: int, spec: ModelSpec, kv: str) -> None:
    """Beside the pages there are at most four arrays of the size of what travels."""
    steps = exchange_lowering(chip, tensor, spec, kv)
    for name, program in steps.page_programs().items():
        found = inspect(program.compile(), steps)
        writes = name.startswith("write")
        assert not found.copies and not found.collectives, (name, found)
        assert found.aliased >= (bytes_per_device(steps.state.kept) if writes else 0), name
        assert found.temporaries < steps.page_io.transit_bytes, name
