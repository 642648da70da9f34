"""Error of kernels in C++ that cannot be used here."""

from jaxserve.errors import NotBuiltInError


class CpuKernelError(NotBuiltInError):
    """The library of kernels was not built, or does not run with this jaxlib or processor."""
