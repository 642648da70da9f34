"""The instructions of the CPU's kernel that tests try."""

import pytest

from jaxserve.cpu_kernels.errors import CpuKernelError
from jaxserve.cpu_kernels.library import INSTRUCTIONS, supported

KERNELS = INSTRUCTIONS


def instructions(asked: str) -> str:
    """Return these instructions, or skip the test where the kernel cannot run with them."""
    try:
        found = supported()
    except CpuKernelError as error:
        pytest.skip(str(error))
    if asked not in found:
        pytest.skip(f"this processor has no {asked}")
    return asked
