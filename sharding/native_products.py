"""Products of 8-bit numbers that chips compute without widening them."""

from typing import Any, Final

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.sharding.chips import CHIPS
from jaxserve.sharding.mesh import compute_capability, device_kind, platform

# First CUDA compute capability that multiplies int8, and fp8, for GPUs that CHIPS does not list.
# Turing (7.5) has int8 as well, but XLA's kernels begin with Ampere.
FIRST_INT8: Final = (8, 0)
FIRST_FP8: Final = (8, 9)


def multiplies_natively(mesh: Mesh, dtype: Any) -> bool:
    """Return whether the mesh's chips multiply two numbers of an 8-bit dtype without widening them.

    Compilers accept such products for every chip, so that they cannot be asked. A CPU always
    counts: it computes the right result, if need be with wider numbers.

    Args:
        dtype: Either int8 or float8_e4m3fn.
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if platform(mesh) == "cpu":
        return True
    for chip in CHIPS.values():
        if chip.kind == device_kind(mesh):
            return bool(chip.int8 if is_integer else chip.fp8)
    capability = compute_capability(mesh)
    return capability is not None and capability >= (FIRST_INT8 if is_integer else FIRST_FP8)
