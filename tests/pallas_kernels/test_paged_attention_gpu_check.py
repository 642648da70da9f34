"""Sizes that the Hopper kernel takes and refuses before compiling, and how it cuts a step."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.paged_attention import gpu
from jaxserve.pallas_kernels.paged_attention.api import Demand, KernelError, Layout, Options, Ragged
from jaxserve.pallas_kernels.paged_attention.gpu_plan import SHARED_BYTES, few_plan, many_plan
from jaxserve.pallas_kernels.paged_attention.gpu_work import units_of
from jaxserve.pallas_kernels.paged_attention.tiles import decode_tiles

BF16 = jnp.dtype(jnp.bfloat16)
LLAMA = Options(Layout(8, 128, 64, BF16), 1.0, max_row_tokens=1, device_kind="NVIDIA H200")


def check(
    layout: Layout = LLAMA.layout,
    heads: int = 32,
    dtype: str = "bfloat16",
    kind: str = "NVIDIA H200",
) -> None:
    gpu.check(
        replace(LLAMA, layout=layout, device_kind=kind),
        Demand(heads, 64, 128, jnp.dtype(dtype), kind),
    )


@pytest.mark.parametrize(
    "kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200", "NVIDIA GH200 480GB"]
)
def test_hoppers_are_taken(kind: str) -> None:
    check(kind=kind)


@pytest.mark.parametrize(
    "kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA L4", "NVIDIA B200", "NVIDIA GB200", "NVIDIA RTX H"]
)
def test_other_gpus_are_refused(kind: str) -> None:
    with pytest.raises(
        KernelError, match=rf"for Hopper \(H100, H200\); this is {kind} \(--attention reference\)"
    ):
        check(kind=kind)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("page_size", [16, 64, 192])
def test_two_blocks_fit_into_shared_memory(head_dim: int, page_size: int) -> None:
    layout = Layout(8, head_dim, page_size, BF16)
    check(layout)
    options = replace(LLAMA, layout=layout)
    for plan in (
        few_plan(options, 32, 64, 1, 8192),
        few_plan(options, 32, 4096, 1, 8192),
        many_plan(options, 32),
    ):
        queries = plan.warpgroups * 64 * (head_dim * 2 + (64 * 4 if plan.splits > 1 else 0))
        blocks = plan.stages * 2 * plan.block_tokens * head_dim * 2
        assert plan.stages >= 2 and plan.per_core * (queries + blocks + 3072) <= SHARED_BYTES
        assert plan.per_core * (plan.warpgroups + plan.has_fetcher) <= 3


@pytest.mark.parametrize(
    ("layout", "heads", "dtype", "reason"),
    [
        (Layout(8, 128, 64, BF16), 12, "bfloat16", "12 query heads do not divide by 8 kv heads"),
        (Layout(8, 128, 64, BF16), 32, "float32", r"queries of float32 .*--dtype bfloat16"),
        (Layout(8, 128, 64, jnp.dtype("float16")), 32, "bfloat16", "pages of float16"),
        (
            Layout(8, 256, 64, jnp.dtype("int8")),
            32,
            "bfloat16",
            f"heads of 256 .* fit into {SHARED_BYTES} bytes",
        ),
        (Layout(8, 80, 64, BF16), 32, "bfloat16", r"heads of 80: .* \(64, 128, 192, 256\)"),
        (
            Layout(8, 128, 40, BF16),
            32,
            "bfloat16",
            r"pages of 40 tokens .* multiple of 16 \(--page-size",
        ),
        (
            Layout(8, 128, 16, jnp.dtype("int8")),
            32,
            "bfloat16",
            r"pages of 16 tokens of int8: .* multiple of 32",
        ),
        (
            Layout(1, 576, 64, BF16, 500),
            16,
            "bfloat16",
            "latent pages of 576 numbers .* 500 .* multiples of 64 and of 128",
        ),
        (
            Layout(1, 576, 64, jnp.dtype("int8"), 512),
            16,
            "bfloat16",
            "latent pages of 576 numbers in int8",
        ),
    ],
)
def test_what_it_refuses(layout: Layout, heads: int, dtype: str, reason: str) -> None:
    with pytest.raises(KernelError, match=reason):
        check(layout, heads, dtype)


@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("rows", [1, 64, 256])
def test_two_thread_blocks_share_a_multiprocessor_when_llama_decodes(
    kv_heads: int, rows: int
) -> None:
    plan = few_plan(
        replace(LLAMA, layout=Layout(kv_heads, 128, 64, BF16)), 4 * kv_heads, rows, 1, 8192
    )
    assert (plan.per_core, plan.has_fetcher) == (2, False) and plan.stages >= 2


@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_thread_blocks_that_convert_are_alone(head_dim: int) -> None:
    plan = few_plan(
        replace(LLAMA, layout=Layout(8, head_dim, 64, jnp.dtype("int8"))), 32, 64, 1, 8192
    )
    assert (plan.per_core, plan.has_fetcher) == (1, True)


def test_rows_are_split_no_further_than_their_tables_reach() -> None:
    assert [
        few_plan(LLAMA, 32, 8, 1, context).splits for context in (64, 256, 257, 4096, 2**17)
    ] == [1, 1, 2, 16, 32]


@pytest.mark.parametrize(
    ("kind", "cores"),
    [("NVIDIA H200", 132), ("NVIDIA H100 PCIe", 114), ("NVIDIA H20", 78), ("cpu", 2)],
)
def test_thread_blocks_are_as_many_as_multiprocessors(kind: str, cores: int) -> None:
    assert many_plan(replace(LLAMA, device_kind=kind), 32).cores == cores


@pytest.mark.parametrize(
    ("heads", "kv_heads", "walked", "each"),
    [(32, 8, 8, 4), (128, 1, 2, 64), (130, 2, 10, 13), (67, 1, 67, 1)],
)
def test_more_than_64_query_heads_are_shared_out(
    heads: int, kv_heads: int, walked: int, each: int
) -> None:
    plan = few_plan(replace(LLAMA, layout=Layout(kv_heads, 128, 64, BF16)), heads, 8, 1, 8192)
    assert (plan.heads, plan.groups) == (walked, each)


def test_parts_cover_what_a_row_sees_and_nothing_else() -> None:
    """Parts cover each seen page of a row once, with and without a window.

    No part but the last is smaller than asked.
    """
    lengths = np.array([1, 64, 65, 256, 257, 5000, 8192, 300, 0, 0], np.int32)
    rows = len(lengths)
    ragged = Ragged(
        jnp.zeros((rows, 128), jnp.int32), jnp.asarray(lengths), *(jnp.zeros(rows, jnp.int32),) * 4
    )
    for window in (None, 100, 1000):
        plan = few_plan(replace(LLAMA, window=window), 32, rows, 1, 8192)
        units, parts = units_of(decode_tiles(ragged), plan)
        seen: list[list[int]] = [[] for _ in lengths]
        for i in range(int(units.live[0])):
            row, begin, end = (int(x[i]) for x in (units.row, units.begin, units.end))
            assert (
                units.place[i] // plan.splits == row
                and int(units.place[i]) % plan.splits < parts[row]
            )
            assert begin % 64 == end % 64 == 0 and begin < end
            seen[row] += range(begin, end)
        for row, length in enumerate(lengths):
            begin = 0 if window is None else max(0, int(length) - window) // 64 * 64
            assert seen[row] == list(range(begin, -(-int(length) // 64) * 64))
        assert parts.max() <= plan.splits and units.live[0] == parts.sum()


def test_a_row_is_split_by_its_own_length_alone() -> None:
    def parts(lengths: list[int]) -> list[int]:
        ragged = Ragged(
            jnp.zeros((3, 128), jnp.int32), jnp.asarray(lengths), *(jnp.zeros(3, jnp.int32),) * 4
        )
        return units_of(decode_tiles(ragged), few_plan(LLAMA, 32, 3, 1, 8192))[1].tolist()

    alone = parts([3000, 0, 0])
    together = parts([8192, 3000, 5])
    assert alone[0] == together[1] > 1
