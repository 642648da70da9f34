"""Which implementation of a kernel a step is lowered with: by name, or by the platform of the mesh it is lowered for.

Never by the default backend: steps are compiled for hardware that is not there.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.api import KernelError, PagedAttention

PAGED_ATTENTION: Final[Mapping[str, PagedAttention]] = MappingProxyType({"reference": reference})
# What "auto" means on each platform.
AUTO: Final[Mapping[str, str]] = MappingProxyType({"cpu": "reference", "gpu": "reference", "tpu": "reference"})


def paged_attention(name: str, platform: str) -> PagedAttention:
    """The implementation of this name, or of "auto" the platform's; KernelError when there is none: nothing else
    takes its place.
    """
    chosen = AUTO.get(platform, "reference") if name == "auto" else name
    if chosen not in PAGED_ATTENTION:
        raise KernelError(
            f"attention {name!r} is not built in; choose auto or one of {', '.join(PAGED_ATTENTION)} (--attention)"
        )
    return PAGED_ATTENTION[chosen]
