"""The verdict of the start-up checks that compare a kernel with its reference."""

from typing import Any

from jaxserve.errors import EngineError


def require_agreement(
    subject: str, difference: float, bound: float, flag: str, device: Any, unit: str = ""
) -> None:
    """Raise EngineError when a kernel differs from its reference by more than rounding.

    Args:
        subject: Kernel and what it computed, for the message.
        flag: Option that names the kernel.
        unit: Unit of `difference` and `bound`, for the message.
    """
    # Not written with ">": a difference of NaN must not pass.
    if not difference <= bound:
        raise EngineError(
            f"{subject} differs from the reference by {difference:.2g}{unit} on "
            f"{device.device_kind}, and rounding explains at most {bound}: start with {flag} "
            "reference, and please report this"
        )
