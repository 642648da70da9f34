"""A product with an operand in registers for Pallas's interpreter of GPUs, which has none."""

from typing import Any

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import HostAllocationKey


def multiply_from_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply an operand in registers.

    The interpreter's callback takes keys of operands' memory. An operand in registers arrives as a
    matrix instead, and is multiplied here.
    """
    from_memory = gpu_callbacks.wgmma

    def wgmma(*, a_allocation_key_as_array: Any, **given: Any) -> Any:
        if np.ndim(a_allocation_key_as_array) != 2:
            return from_memory(a_allocation_key_as_array=a_allocation_key_as_array, **given)
        return _multiply(np.asarray(a_allocation_key_as_array), **given)

    monkeypatch.setattr(gpu_callbacks, "wgmma", wgmma)


def _multiply(
    a: np.ndarray,
    *,
    token: jax.Array,
    mesh_location: Any,
    thread: Any,
    acc_allocation_key_as_array: Any,
    acc_transforms: Any,
    b_allocation_key_as_array: Any,
    b_transforms: Any,
    source_info: Any = None,
    **others: Any,
) -> jax.Array:
    memory = gpu_callbacks._get_shared_memory()

    def place(key_as_array: Any, transforms: Any) -> tuple[Any, Any]:
        key = HostAllocationKey.from_array(key_as_array)
        plain = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
        return key, memory.access(key, plain)

    acc = place(acc_allocation_key_as_array, acc_transforms)
    b = place(b_allocation_key_as_array, b_transforms)
    sums, right = (
        np.asarray(memory.get_buffer_content(*where, thread)[0], np.float32) for where in (acc, b)
    )
    found = sums + a.astype(np.float32) @ right
    memory.store_buffer_content(*acc, found, thread)
    return token
