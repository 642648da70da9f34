"""Hopper kernels as tests run them: in Pallas's interpreter, or on the GPU that is there."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.grouped_matmul import gpu_plan as grouped_plan
from jaxserve.pallas_kernels.hopper import FEW_CORES
from jaxserve.pallas_kernels.paged_attention import gpu_plan as attention_plan
from jaxserve.pallas_kernels.quantized_matmul import gpu_plan as quantized_plan

# Multiprocessors that share the work on a GPU: so few that each of them has several units of it, as
# in the interpreter. For attention, FEW_CORES would stand for the interpreter.
CORES = (
    (attention_plan, FEW_CORES + 1),
    (grouped_plan, FEW_CORES),
    (quantized_plan, FEW_CORES),
)


def on_gpu() -> bool:
    """Return whether kernels run on a GPU."""
    return jax.default_backend() == "gpu"


@contextmanager
def interpreted_or_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpret the kernels of this block, and look for races; on a GPU run them."""
    if on_gpu():
        for plan, cores in CORES:
            monkeypatch.setattr(plan, "cores_of", lambda device_kind, cores=cores: cores)
        yield
        return
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
    assert not interpreter.get_races().races_found
