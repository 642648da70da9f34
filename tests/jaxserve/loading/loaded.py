"""Parameters of a checkpoint, planned and loaded in one call."""

from typing import Any

from jax.sharding import Mesh

from jaxserve.cpu_kernels.products import CpuProduct
from jaxserve.loading import parameters
from jaxserve.loading.load_plan import plan_load
from jaxserve.loading.spec import Checkpoint, read_architecture


def load_params(
    checkpoint: Checkpoint,
    mesh: Mesh,
    dtype: str = "auto",
    weights: str = "auto",
    product: CpuProduct | None = None,
    **rest: Any,
) -> dict:
    """Load the parameters; `rest` is for jaxserve.loading.parameters.load_params."""
    plan = plan_load(read_architecture(checkpoint), mesh, dtype, weights, product)
    return parameters.load_params(plan, **rest)
