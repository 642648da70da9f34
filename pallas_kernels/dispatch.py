"""Which implementation of a kernel a step is lowered with: by name, or the first that the
platform's list has to offer.

The platform is that of the mesh the step is lowered for, never the default backend: steps are
compiled for hardware that is not there.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from pallas_kernels.errors import KernelError
from pallas_kernels.grouped_matmul import api as grouped
from pallas_kernels.grouped_matmul import gpu as grouped_gpu
from pallas_kernels.grouped_matmul import reference as grouped_reference
from pallas_kernels.grouped_matmul import tpu as grouped_tpu
from pallas_kernels.paged_attention import api as paged
from pallas_kernels.paged_attention import gpu, reference, tpu
from pallas_kernels.quantized_matmul import api as quantized
from pallas_kernels.quantized_matmul import gpu as quantized_gpu
from pallas_kernels.quantized_matmul import reference as quantized_reference
from pallas_kernels.quantized_matmul import tpu as quantized_tpu

IMPLEMENTATIONS: Final[Mapping[str, paged.PagedAttention]] = MappingProxyType(
    {"reference": reference, "gpu": gpu, "tpu": tpu}
)
GROUPED: Final[Mapping[str, grouped.GroupedMatmul]] = MappingProxyType(
    {"reference": grouped_reference, "gpu": grouped_gpu, "tpu": grouped_tpu}
)
QUANTIZED: Final[Mapping[str, quantized.QuantizedMatmul]] = MappingProxyType(
    {"reference": quantized_reference, "gpu": quantized_gpu, "tpu": quantized_tpu}
)
PLATFORMS: Final[Mapping[str, str]] = MappingProxyType(
    {"gpu": "gpu", "tpu": "tpu"}
)  # of those that run on one alone
# What "auto" tries on each platform, in this order.
CANDIDATES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"cpu": ("reference",), "gpu": ("gpu", "reference"), "tpu": ("tpu",)}
)
QUANTIZED_CANDIDATES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {**CANDIDATES, "tpu": ("tpu", "reference")}
)


def choose(
    name: str,
    platform: str,
    steps: Sequence[tuple[paged.Options, paged.Demand]],
    refused: Callable[[str, KernelError], None] = lambda name, error: None,
) -> str:
    """The name of the implementation of paged attention that takes all of these steps.

    "auto": the first of the platform's candidates that can; `refused` is told of those before it,
    and why they cannot. A name is that one or KernelError: nothing takes its place.
    """
    return _choose("attention", IMPLEMENTATIONS, name, platform, lambda kernel: steps, refused)


def choose_grouped(
    name: str,
    platform: str,
    demands: Callable[[grouped.GroupedMatmul], Sequence[tuple[grouped.Options, grouped.Demand]]],
    refused: Callable[[str, KernelError], None] = lambda name, error: None,
) -> str:
    """The same of the grouped matrix product, for all products that are asked of an
    implementation."""
    return _choose("grouped-matmul", GROUPED, name, platform, demands, refused)


def choose_quantized(
    name: str,
    platform: str,
    asked: tuple[quantized.Options, quantized.Demand],
    refused: Callable[[str, KernelError], None] = lambda name, error: None,
) -> str:
    """The same of the quantized matrix product, for one weight."""
    return _choose(
        "quantized-matmul",
        QUANTIZED,
        name,
        platform,
        lambda kernel: [asked],
        refused,
        QUANTIZED_CANDIDATES,
    )


def _choose(
    what: str,
    built_in: Mapping[str, Any],
    name: str,
    platform: str,
    demands: Callable[[Any], Sequence[tuple[Any, Any]]],
    refused: Callable[[str, KernelError], None],
    by_platform: Mapping[str, tuple[str, ...]] | None = None,
) -> str:
    """what: the kernel, as its flag has it. by_platform: what "auto" tries; None: CANDIDATES."""
    candidates = CANDIDATES if by_platform is None else by_platform
    known = ", ".join(built_in)
    if name != "auto" and name not in built_in:
        raise KernelError(
            f"{what} {name!r} is not built in; choose auto or one of {known} (--{what})"
        )
    if name == "auto" and platform not in candidates:
        raise KernelError(
            f"no {what} is known to run on {platform!r}; name one of {known} (--{what})"
        )
    if (own := PLATFORMS.get(name, platform)) != platform:
        raise KernelError(
            f"{what} {name!r} runs on {own!r}, and this is {platform!r}; choose auto (--{what})"
        )
    *others, last = candidates[platform] if name == "auto" else (name,)
    for candidate in others:
        try:
            _check(built_in[candidate], demands)
        except KernelError as error:
            refused(candidate, error)
        else:
            return candidate
    _check(built_in[last], demands)
    return last


def _check(implementation: Any, demands: Callable[[Any], Sequence[tuple[Any, Any]]]) -> None:
    for options, demand in demands(implementation):
        implementation.check(options, demand)
