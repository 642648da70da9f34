"""Instructions of the kernels for a CPU, for tests that run with each of them."""

import pytest

from jaxserve.cpu_kernels import library
from jaxserve.cpu_kernels.errors import CpuKernelError


def require_instructions(instructions: str) -> None:
    """Skip the test where the library was not built, or the processor lacks the instructions."""
    try:
        supported = library.supported()
    except CpuKernelError as error:
        pytest.skip(str(error))
    if instructions not in supported:
        pytest.skip(f"this processor has no {instructions}")
