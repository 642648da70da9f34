"""Choice of the implementation of a kernel that a step is lowered with.

An implementation is chosen by name, or as the first of the platform's list that can run the steps.
The platform is that of the mesh the step is lowered for, never the default backend: steps are
compiled for hardware that is not present.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.pallas_kernels.gated_delta import api as gated_delta
from jaxserve.pallas_kernels.gated_delta import chunked as gated_delta_chunked
from jaxserve.pallas_kernels.grouped_matmul import api as grouped
from jaxserve.pallas_kernels.grouped_matmul import reference as grouped_reference
from jaxserve.pallas_kernels.implementations import Implementations
from jaxserve.pallas_kernels.paged_attention import api as paged
from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.quantized_matmul import api as quantized
from jaxserve.pallas_kernels.quantized_matmul import reference as quantized_reference


def _paged_cpu() -> paged.PagedAttention:
    from jaxserve.pallas_kernels.paged_attention import cpu

    return cpu


def _paged_gpu() -> paged.PagedAttention:
    from jaxserve.pallas_kernels.paged_attention import gpu

    return gpu


def _paged_tpu() -> paged.PagedAttention:
    from jaxserve.pallas_kernels.paged_attention import tpu

    return tpu


def _grouped_gpu() -> grouped.GroupedMatmul:
    from jaxserve.pallas_kernels.grouped_matmul import gpu

    return gpu


def _grouped_tpu() -> grouped.GroupedMatmul:
    from jaxserve.pallas_kernels.grouped_matmul import tpu

    return tpu


def _quantized_gpu() -> quantized.QuantizedMatmul:
    from jaxserve.pallas_kernels.quantized_matmul import gpu

    return gpu


def _quantized_tpu() -> quantized.QuantizedMatmul:
    from jaxserve.pallas_kernels.quantized_matmul import tpu

    return tpu


def _gated_delta_gpu() -> gated_delta.GatedDelta:
    from jaxserve.pallas_kernels.gated_delta import gpu

    return gpu


def _gated_delta_tpu() -> gated_delta.GatedDelta:
    from jaxserve.pallas_kernels.gated_delta import tpu

    return tpu


IMPLEMENTATIONS: Final[Mapping[str, paged.PagedAttention]] = Implementations(
    {
        "reference": lambda: reference,
        "cpu": _paged_cpu,
        "gpu": _paged_gpu,
        "tpu": _paged_tpu,
    }
)
GROUPED: Final[Mapping[str, grouped.GroupedMatmul]] = Implementations(
    {"reference": lambda: grouped_reference, "gpu": _grouped_gpu, "tpu": _grouped_tpu}
)
QUANTIZED: Final[Mapping[str, quantized.QuantizedMatmul]] = Implementations(
    {"reference": lambda: quantized_reference, "gpu": _quantized_gpu, "tpu": _quantized_tpu}
)
RECURRENCES: Final[Mapping[str, gated_delta.GatedDelta]] = Implementations(
    {"reference": lambda: gated_delta_chunked, "gpu": _gated_delta_gpu, "tpu": _gated_delta_tpu}
)
# The platform of each implementation that runs on one alone.
PLATFORMS: Final[Mapping[str, str]] = MappingProxyType({"cpu": "cpu", "gpu": "gpu", "tpu": "tpu"})
# Implementations that run in tests as they do in an engine. What a device's compiler makes of the
# others is checked at start-up.
RUN_IN_TESTS: Final = ("reference", "cpu")
# Implementations that "auto" tries on each platform, in this order.
CANDIDATES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"cpu": ("cpu", "reference"), "gpu": ("gpu", "reference"), "tpu": ("tpu",)}
)
GROUPED_CANDIDATES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {**CANDIDATES, "cpu": ("reference",)}
)
QUANTIZED_CANDIDATES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {**GROUPED_CANDIDATES, "tpu": ("tpu", "reference")}
)
RECURRENCE_CANDIDATES: Final = QUANTIZED_CANDIDATES


def choose(
    name: str,
    platform: str,
    steps: Sequence[tuple[paged.Options, paged.Demand]],
    refused: Callable[[str, KernelError], None] = lambda name, error: None,
) -> str:
    """Return the name of the implementation of paged attention that takes all of these steps.

    Args:
        name: An implementation, or "auto" for the first of the platform's candidates that takes the
            steps.
        refused: Function called with each candidate before the returned one, and with its error.

    Raises:
        KernelError: A named implementation cannot run the steps, since nothing takes its place, or
            no candidate can.
    """
    return _choose(
        "attention", IMPLEMENTATIONS, name, platform, lambda kernel: steps, refused, CANDIDATES
    )


def choose_grouped(
    name: str,
    platform: str,
    demands: Callable[[grouped.GroupedMatmul], Sequence[tuple[grouped.Options, grouped.Demand]]],
    refused: Callable[[str, KernelError], None] = lambda name, error: None,
) -> str:
    """Return the name of the implementation of the grouped matrix product; see `choose`.

    Args:
        demands: Function that returns the products that an implementation would be asked for.
    """
    return _choose("grouped-matmul", GROUPED, name, platform, demands, refused, GROUPED_CANDIDATES)


def choose_quantized(
    name: str,
    platform: str,
    asked: tuple[quantized.Options, quantized.Demand],
    refused: Callable[[str, KernelError], None] = lambda name, error: None,
) -> str:
    """Return the name of the implementation of the quantized matrix product; see `choose`.

    Args:
        asked: Product of one weight.
    """
    return _choose(
        "quantized-matmul",
        QUANTIZED,
        name,
        platform,
        lambda kernel: [asked],
        refused,
        QUANTIZED_CANDIDATES,
    )


def choose_recurrence(
    name: str,
    platform: str,
    asked: Sequence[tuple[gated_delta.Options, gated_delta.Demand]],
    refused: Callable[[str, KernelError], None] = lambda name, error: None,
) -> str:
    """Return the name of the implementation of the gated delta rule; see `choose`.

    Args:
        asked: States that are to be advanced.
    """
    return _choose(
        "recurrence",
        RECURRENCES,
        name,
        platform,
        lambda kernel: asked,
        refused,
        RECURRENCE_CANDIDATES,
    )


def _choose(
    what: str,
    built_in: Mapping[str, Any],
    name: str,
    platform: str,
    demands: Callable[[Any], Sequence[tuple[Any, Any]]],
    refused: Callable[[str, KernelError], None],
    candidates: Mapping[str, tuple[str, ...]],
) -> str:
    """Return the name of the first implementation that meets all demands.

    Args:
        what: Name of the kernel in its flag.
        candidates: Implementations that "auto" tries on each platform, in this order.
    """
    known = ", ".join(built_in)
    if name != "auto" and name not in built_in:
        raise KernelError(
            f"{what} {name!r} is not built in; choose auto or one of {known} (--{what})"
        )
    if name == "auto" and platform not in candidates:
        raise KernelError(
            f"no {what} is known to run on {platform!r}; name one of {known} (--{what})"
        )
    own = PLATFORMS.get(name, platform)
    if own != platform:
        raise KernelError(
            f"{what} {name!r} runs on {own!r}, and this is {platform!r}; choose auto (--{what})"
        )
    # The last candidate's refusal is not caught: the caller learns why nothing can run the steps.
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
    """Raise KernelError if the implementation cannot meet all demands."""
    for options, demand in demands(implementation):
        implementation.check(options, demand)
