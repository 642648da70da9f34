"""The choice between XLA and the kernel of a CPU for products with weights."""

import logging

from jax.sharding import Mesh

from jaxserve.cpu_kernels.errors import CpuKernelError
from jaxserve.cpu_kernels.library import load, missing_level, supported
from jaxserve.cpu_kernels.products import CpuProduct
from jaxserve.flag_errors import flag_error
from jaxserve.models.precision import AUTO, XLA, check_product
from jaxserve.sharding.mesh import device_kind, platform

log = logging.getLogger("jaxserve.engine")


def require_use(asked: str, found: CpuProduct | None) -> None:
    """Raise ConfigError where a kernel was asked for by name, and multiplies no weight.

    Args:
        found: How the parameters are multiplied (summed_last.product_in).
    """
    if asked not in (AUTO, XLA) and found is None:
        problem = "none of the weights is in a form that the kernel multiplies (leave it out)"
        raise flag_error("--product", asked, problem)


def choose_product(asked: str, mesh: Mesh) -> CpuProduct | None:
    """Return how a mesh that is one CPU multiplies by the weights; None where XLA does.

    Args:
        asked: A name that --product takes. With auto the kernel is taken where a mesh is one CPU,
            and the log says why where it cannot be.

    Raises:
        ConfigError: The instructions that are asked for do not run here, or the mesh is not one
            CPU.
    """
    check_product(asked)
    if asked == XLA:
        return None
    if platform(mesh) != "cpu" or mesh.size > 1:
        if asked == AUTO:
            return None
        here = f"this mesh has {mesh.size} of {device_kind(mesh)}"
        raise flag_error("--product", asked, f"it is for a mesh of one CPU; {here} (choose {XLA})")
    try:
        found = load().instructions
    except CpuKernelError as error:
        if asked == AUTO:
            log.log(missing_level(), "products of few rows are XLA's: %s", error)
            return None
        raise flag_error("--product", asked, str(error)) from error
    if asked == AUTO:
        return CpuProduct.of(found)
    if asked not in supported():
        here = f"this processor has {' and '.join(supported())}"
        raise flag_error("--product", asked, f"{here} (choose {AUTO})")
    return CpuProduct.of(asked)
