"""The instructions of the CPU's kernel that tests try."""

import pytest

from jaxserve.cpu_kernels.errors import CpuKernelError
from jaxserve.cpu_kernels.library import supported

BEST = "best"  # of the processor
KERNELS = (BEST, "avx2")


def instructions(asked: str) -> str:
    """Return the instructions that one of KERNELS stands for, or skip where they do not run."""
    try:
        found = supported()
    except CpuKernelError as error:
        pytest.skip(str(error))
    if asked == BEST:
        return found[0]
    if asked not in found:
        pytest.skip(f"this processor has no {asked}")
    return asked
