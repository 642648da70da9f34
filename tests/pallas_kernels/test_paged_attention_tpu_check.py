"""Sizes that the TPU kernel takes and refuses before compiling."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import jax.numpy as jnp
import pytest

from jaxserve.pallas_kernels.paged_attention import tpu
from jaxserve.pallas_kernels.paged_attention.api import Demand, KernelError, Layout, Options

STEPS_OF_PAGES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "float32": 8,
        "bfloat16": 16,
        "int8": 128,
        "float8_e4m3fn": 128,
    }  # of 8 bits the scales lie in the lanes
)


def check(
    *,
    heads: int = 32,
    kv_heads: int = 8,
    page_size: int = 128,
    stored: str = "bfloat16",
    rows: int = 64,
    width: int = 128,
    max_row_tokens: int | None = 1,
) -> None:
    layout = Layout(kv_heads, 128, page_size, jnp.dtype(stored))
    tpu.check(
        Options(layout, 1.0, max_row_tokens=max_row_tokens),
        Demand(heads, rows, width, jnp.dtype(jnp.bfloat16), "TPU v5 lite"),
    )


@pytest.mark.parametrize("max_row_tokens", [1, 5, None])
@pytest.mark.parametrize("stored", STEPS_OF_PAGES)
def test_pages_of_whole_tiles_are_taken(stored: str, max_row_tokens: int | None) -> None:
    for times in (1, 3, 4):
        check(
            stored=stored, page_size=times * STEPS_OF_PAGES[stored], max_row_tokens=max_row_tokens
        )


@pytest.mark.parametrize(("stored", "step"), STEPS_OF_PAGES.items())
def test_pages_of_parts_of_tiles_are_refused(stored: str, step: int) -> None:
    for size in (1, step // 2, step + step // 2):
        with pytest.raises(KernelError) as caught:
            check(stored=stored, page_size=size)
        assert str(caught.value) == (
            f"pages of {size} tokens of {stored}: on a TPU the size is a multiple of {step} "
            f"(--page-size, or "
            "--attention reference)"
        )


@pytest.mark.parametrize(("rows", "width"), [(8, 2048), (64, 2048), (4096, 32)])
def test_tables_up_to_half_a_mebibyte_are_taken(rows: int, width: int) -> None:
    check(rows=rows, width=width)


@pytest.mark.parametrize(("rows", "width"), [(64, 2049), (65, 2048), (1, 2**17 + 1)])
def test_larger_tables_are_refused(rows: int, width: int) -> None:
    with pytest.raises(KernelError) as caught:
        check(rows=rows, width=width)
    assert str(caught.value) == (
        f"page tables of {rows} rows x {width} pages take {4 * rows * width} bytes of scalar "
        f"memory; "
        "there is room for 524288 (--max-batch, --max-context, or larger pages: --page-size)"
    )


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(KernelError, match="12 query heads do not divide by 8 kv heads"):
        check(heads=12)
    check(heads=8)
    check(heads=4, kv_heads=1)
