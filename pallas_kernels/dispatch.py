"""Which implementation of a kernel a step is lowered with: by name, or the first that the platform's list has to offer.

The platform is that of the mesh the step is lowered for, never the default backend: steps are compiled for hardware
that is not there.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from pallas_kernels.paged_attention import gpu, reference, tpu
from pallas_kernels.paged_attention.api import Demand, KernelError, Options, PagedAttention

IMPLEMENTATIONS: Final[Mapping[str, PagedAttention]] = MappingProxyType(
    {"reference": reference, "gpu": gpu, "tpu": tpu}
)
PLATFORMS: Final[Mapping[str, str]] = MappingProxyType({"gpu": "gpu", "tpu": "tpu"})  # of those that run on one alone
# What "auto" tries on each platform, in this order.
CANDIDATES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"cpu": ("reference",), "gpu": ("gpu", "reference"), "tpu": ("tpu",)}
)


def choose(
    name: str,
    platform: str,
    steps: Sequence[tuple[Options, Demand]],
    refused: Callable[[str, KernelError], None] = lambda name, error: None,
) -> str:
    """The name of the implementation of paged attention that takes all of these steps.

    "auto": the first of the platform's candidates that can; `refused` is told of those before it, and why they cannot.
    A name is that one or KernelError: nothing takes its place.
    """
    known = ", ".join(IMPLEMENTATIONS)
    if name != "auto" and name not in IMPLEMENTATIONS:
        raise KernelError(f"attention {name!r} is not built in; choose auto or one of {known} (--attention)")
    if name == "auto" and platform not in CANDIDATES:
        raise KernelError(f"no attention is known to run on {platform!r}; name one of {known} (--attention)")
    if (own := PLATFORMS.get(name, platform)) != platform:
        raise KernelError(f"attention {name!r} runs on {own!r}, and this is {platform!r}; choose auto (--attention)")
    *others, last = CANDIDATES[platform] if name == "auto" else (name,)
    for candidate in others:
        try:
            _check(candidate, steps)
        except KernelError as error:
            refused(candidate, error)
        else:
            return candidate
    _check(last, steps)
    return last


def _check(name: str, steps: Sequence[tuple[Options, Demand]]) -> None:
    for options, demand in steps:
        IMPLEMENTATIONS[name].check(options, demand)
