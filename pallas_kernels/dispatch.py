"""Which implementation of a kernel a step is lowered with."""

from types import ModuleType

from pallas_kernels.paged_attention import reference


class KernelError(ValueError):
    """An implementation that is not built in, or that cannot take what it is given."""


PAGED_ATTENTION: dict[str, ModuleType] = {"reference": reference}


def paged_attention(name: str) -> ModuleType:
    """The module that implements paged attention under this name; KernelError when there is none."""
    if name not in PAGED_ATTENTION:
        raise KernelError(
            f"attention {name!r} is not built in; choose one of {', '.join(PAGED_ATTENTION)} (--attention)"
        )
    return PAGED_ATTENTION[name]
