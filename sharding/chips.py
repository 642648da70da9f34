"""Which chips multiply two 8-bit numbers as they are. Compilers take such products for any."""

from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from sharding.aot_devices import CHIPS
from sharding.mesh import compute_capability, device_kind, platform

# Of GPUs that CHIPS does not list: the first compute capability. Turing's int8 is older, but XLA's
# kernels begin here.
FIRST_INT8, FIRST_FP8 = (8, 0), (8, 9)


def multiplies(mesh: Mesh, dtype: Any) -> bool:
    """dtype: int8 or float8_e4m3fn. A CPU computes whatever it is asked to, if need be with wider
    numbers.
    """
    integers = jnp.issubdtype(dtype, jnp.integer)
    if platform(mesh) == "cpu":
        return True
    for chip in CHIPS.values():
        if chip.kind == device_kind(mesh):
            return bool(chip.int8 if integers else chip.fp8)
    found = compute_capability(mesh)
    return found is not None and found >= (FIRST_INT8 if integers else FIRST_FP8)
