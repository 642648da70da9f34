"""An implementation by name or by platform, and never another one instead."""

import pytest

from pallas_kernels import dispatch
from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.api import KernelError


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_auto_follows_the_platform(platform: str) -> None:
    name = dispatch.AUTO[platform]
    assert dispatch.paged_attention("auto", platform) is dispatch.paged_attention(name, platform)


def test_a_name_is_what_it_says() -> None:
    assert dispatch.paged_attention("reference", "tpu") is reference
    with pytest.raises(KernelError, match=r"'flash' is not built in; choose auto or one of reference \(--attention\)"):
        dispatch.paged_attention("flash", "cpu")
