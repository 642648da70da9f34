"""Search for the tiles and blocks that suit the TPU kernel, by chip and shape.

Candidates are ranked by a model: no TPU has timed them.

    python -m benchmarks.tune_paged_attention_tpu [--write]

Every candidate must fit the chip's vector memory, by a count of what the kernel keeps there. For
the others the bytes and copies of two steps are counted from the kernel's own schedule
(benchmarks.attention_traffic): 64 rows that decode at 2,048 tokens, and a chunk of 1,536 tokens at
4,096. A block costs the longer of its copies and its products (one hides behind the other), and a
fixed time. The chips' figures are jax's own (pltpu.TpuInfo). --write: into
pallas_kernels/tuned/paged_attention_tpu.json, what differs from the defaults.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from rich.console import Console
from rich.table import Table

from benchmarks.attention_traffic import Traffic, spread, traffic
from jaxserve.pallas_kernels.paged_attention.api import Layout, Options
from jaxserve.pallas_kernels.paged_attention.tpu_plan import Plan, Sizes, shape_of

CHIPS = {
    "TPU v4": "TPU_V4",
    "TPU v5 lite": "TPU_V5E",
    "TPU v5": "TPU_V5P",
    "TPU v6 lite": "TPU_V6E",
    "TPU7x": "TPU_7X",
}
BF16 = jnp.dtype(jnp.bfloat16)
INT8 = jnp.dtype(jnp.int8)
# layout and query heads of a shard: Llama-3 and Qwen3 on 1 to 8 chips, 70B, Gemma 3, DeepSeek
SHAPES = [
    *((Layout(k, 128, 64, BF16), 4 * k) for k in (8, 4, 2, 1)),
    *((Layout(k, 128, 64, BF16), 8 * k) for k in (8, 4, 2, 1)),
    *((Layout(k, 128, 64, BF16), 2 * k) for k in (16, 8, 4, 2)),
    *((Layout(k, 64, 64, BF16), 4 * k) for k in (8, 4, 2, 1)),
    *((Layout(k, 128, 128, INT8), 4 * k) for k in (8, 1)),
    *((Layout(1, 576, 64, BF16, 512), heads) for heads in (16, 128)),
]
SHARE = 0.75  # of the compiler's limit for a kernel, for what the count leaves out
LIMIT = (
    16 * 2**20
)  # bytes of vector memory that the compiler lets a kernel have without being asked
BLOCK_SECONDS, COPY_SECONDS, GRID_SECONDS = (
    3e-7,
    5e-8,
    3.5e-7,
)  # judgement, of a block, a copy's start, a grid step


def candidates() -> Iterator[Sizes]:
    for tokens, tiles in product((128, 256, 512, 1024), (4, 8, 16)):
        yield Sizes(decode_tokens=tokens, decode_tiles=tiles)
    for tokens, rows in product((256, 512, 1024), (128, 256, 512, 1024)):
        yield Sizes(chunk_tokens=tokens, query_rows=rows)


def vector_bytes(plan: Plan) -> int:
    """Return the bytes that the kernel keeps on the chip.

    Blocks that come and go count twice; its own arrays and one head's scores are added.
    """
    layout = plan.options.layout
    lanes = plan.lanes
    rows = max(plan.rows, 8)
    tokens = plan.block_tokens
    item = 2 if layout.scaled else layout.dtype.itemsize
    coming = (
        plan.per_step
        * plan.heads
        * (rows * (lanes.keys + lanes.value_lanes) * item + 8 * lanes.total * 4)
    )
    held = 2 * plan.heads * tokens * lanes.total * layout.dtype.itemsize
    running = plan.heads * rows * (lanes.value_lanes + 2 * 128) * 4
    one_head = rows * tokens * (4 + 4 + 4 + item) + tokens * (lanes.keys + lanes.value_lanes) * item
    return 2 * coming + held + running + one_head


def seconds(moved: Traffic, plan: Plan, chip: pltpu.TpuInfo, tiles: int, context: int) -> float:
    """Return the seconds of one layer's step, by the model."""
    layout = plan.options.layout
    lanes = plan.lanes
    blocks = tiles * (layout.kv_heads // plan.heads) * -(-context // plan.block_tokens)
    rows = max(
        plan.rows, chip.mxu_column_size
    )  # fewer leave the matrix unit waiting for its weights
    products = (
        2
        * rows
        * plan.block_tokens
        * (lanes.keys + lanes.value_lanes)
        * plan.heads
        / chip.bf16_ops_per_second
    )
    copies = (
        moved.pages / blocks / chip.mem_bw_bytes_per_second + COPY_SECONDS * moved.copies / blocks
    )
    others = (moved.total - moved.pages) / chip.mem_bw_bytes_per_second
    return (
        blocks * (max(products, copies) + BLOCK_SECONDS)
        + others
        + GRID_SECONDS * tiles / plan.per_step
    )


def best(layout: Layout, heads: int, chip: pltpu.TpuInfo) -> tuple[Sizes, float, float]:
    """Return the sizes, and the model's seconds of both steps."""
    decode = Options(layout, 1.0, max_row_tokens=1)
    chunk = Options(layout, 1.0)
    found: dict[bool, list[tuple[float, Sizes]]] = {True: [], False: []}
    for sizes in candidates():
        is_chunk = (sizes.decode_tokens, sizes.decode_tiles) == Sizes()[:2]
        if is_chunk:
            moved, plan = traffic(chunk, heads, [4096], [1536], sizes)
            tiles = -(-1536 // plan.tokens)
            context = 4096 + 768
        else:
            moved, plan = traffic(
                decode, heads, spread(2048, 64, layout.page_size), [1] * 64, sizes
            )
            tiles = 64
            context = 2048
        if vector_bytes(plan) <= SHARE * LIMIT:
            found[is_chunk].append((seconds(moved, plan, chip, tiles, context), sizes))
    (chunk_time, of_chunks), (decode_time, of_decode) = (
        min(found[kind], key=lambda x: x[0]) for kind in (True, False)
    )
    sizes = Sizes(
        of_decode.decode_tokens,
        of_decode.decode_tiles,
        of_chunks.chunk_tokens,
        of_chunks.query_rows,
    )
    return sizes, decode_time, chunk_time


def main() -> None:
    what = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune_paged_attention_tpu", description=what
    )
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    table = Table("chip", "shape", *Sizes._fields, "decode, us", "chunk, us")
    sizes = dict[str, dict[str, dict]]()
    for kind, version in CHIPS.items():
        chip = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion[version], 1)
        for layout, heads in SHAPES:
            chosen, decode_time, chunk_time = best(layout, heads, chip)
            name = shape_of(layout, heads // layout.kv_heads)
            other = {
                key: value
                for key, value in chosen._asdict().items()
                if value != Sizes._field_defaults[key]
            }
            sizes.setdefault(kind, {})[name] = other
            table.add_row(
                kind, name, *map(str, chosen), f"{1e6 * decode_time:.0f}", f"{1e6 * chunk_time:.0f}"
            )
    Console().print(table)
    if args.write:
        note = (
            "By python -m benchmarks.tune_paged_attention_tpu --write: a model's ranking, "
            "timed on no TPU."
        )
        path = Path("pallas_kernels/tuned/paged_attention_tpu.json")
        path.write_text(json.dumps({"note": note, "sizes": sizes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
