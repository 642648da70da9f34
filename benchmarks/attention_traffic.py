"""Bytes that a step of the TPU kernel moves, counted from its tiles, spans and visits.

Nothing runs on a device.

    python -m benchmarks.attention_traffic [--out FILE.json]

For decode steps of 8, 64 and 256 rows at contexts of 512 to 32k tokens, one layer of one shard:
what is copied of pages, what new tokens, queries and results add, and that over the floor, each
live page once; and how much of the pages lies behind the last token of its row, when lengths are
spread evenly over a page. A table goes beside FILE.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.pallas_kernels.paged_attention.api import Layout, Options, Ragged
from jaxserve.pallas_kernels.paged_attention.lanes import Lanes, sublanes
from jaxserve.pallas_kernels.paged_attention.tpu import scalars_of, tiles_of
from jaxserve.pallas_kernels.paged_attention.tpu_body import Span
from jaxserve.pallas_kernels.paged_attention.tpu_plan import Plan, Sizes, plan_of
from jaxserve.pallas_kernels.paged_attention.tpu_write import visits_of

SHAPES = {  # layout and query heads of a shard
    "Llama-3-8B": (Layout(8, 128, 64, jnp.dtype(jnp.bfloat16)), 32),
    "Llama-3-8B, 1 of 8 shards": (Layout(1, 128, 64, jnp.dtype(jnp.bfloat16)), 4),
    "Llama-3-8B, int8 pages": (Layout(8, 128, 128, jnp.dtype(jnp.int8)), 32),
    "DeepSeek-V2-Lite, latent": (Layout(1, 576, 64, jnp.dtype(jnp.bfloat16), 512), 16),
}
ROWS = (8, 64, 256)
CONTEXTS = (512, 2048, 8192, 32768)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one layer's step; floor: each page once of which a query sees anything."""

    pages: int  # fetched for attention
    inserted: int  # written around the tokens of rows that have one
    visited: int  # read and written, with the new tokens beside, for chunks
    queries: int
    results: int
    new: int
    floor: int
    dead: int  # of the floor: places of pages that no query sees
    copies: int  # of pages, one for each group of heads

    @property
    def total(self) -> int:
        return self.pages + self.inserted + self.visited + self.queries + self.results + self.new

    @property
    def over_floor(self) -> float:
        return self.total / self.floor


def traffic(
    options: Options,
    heads: int,
    cached: Sequence[int],
    new: Sequence[int],
    sizes: Sizes | None = None,
    num_tokens: int | None = None,
) -> tuple[Traffic, Plan]:
    """Return the traffic of rows with `cached` tokens in pages and `new` ones in the step.

    Rows are in the contract's order. num_tokens: T.
    """
    layout = options.layout
    rows = len(new)
    num_tokens = num_tokens or max(sum(new), 1)
    lengths = np.add(cached, new) * (np.asarray(new) > 0)
    starts = np.concatenate([[0], np.cumsum(new)])
    width = -(-int(lengths.max()) // layout.page_size)
    plan = plan_of(options, heads, rows, num_tokens, width, sizes)
    ragged = _on_page_0(lengths, starts, width, num_tokens)
    tiles = tiles_of(ragged, plan, num_tokens)
    live = int(tiles.live[0])
    begin, end = Span.of(tiles.first[:live], tiles.count[:live], options.window).range_in(
        layout.page_size
    )
    span = Span.of(jnp.asarray(cached), jnp.asarray(new), options.window)
    has = np.asarray(new) > 0
    seen_begin, seen_end = (np.asarray(x)[has] for x in span.range_in(layout.page_size))
    tokens_seen = int((np.asarray(span.last) - np.asarray(span.begin) + 1)[has].sum())
    fetched = int(jnp.sum(end - begin))
    floor_pages = int((seen_end - seen_begin).sum())
    lanes = Lanes.of(layout)
    n = len(tiles.row)
    scales = 4 * layout.page_size * (1 if layout.value_dim else 2) if layout.scaled else 0
    page = layout.kv_heads * (layout.page_size * lanes.total * layout.dtype.itemsize + scales)
    around = layout.kv_heads * (
        sublanes(layout.dtype) * lanes.total * layout.dtype.itemsize + scales
    )
    inserted = int(scalars_of(ragged, tiles, 1).insert.sum())
    visits = (
        0
        if options.max_row_tokens == 1
        else int(visits_of(ragged, num_tokens, layout.page_size).live[0])
    )
    query_bytes = 2 if layout.scaled else layout.dtype.itemsize
    moved = Traffic(
        pages=fetched * page,
        inserted=inserted * around,
        visited=3 * visits * page,
        queries=n * layout.kv_heads * plan.rows * lanes.keys * query_bytes,
        results=n * layout.kv_heads * plan.rows * lanes.value_lanes * query_bytes,
        new=n * layout.kv_heads * lanes.total * 4,
        floor=floor_pages * page,
        dead=(floor_pages * layout.page_size - tokens_seen) * page // layout.page_size,
        copies=fetched * (layout.kv_heads // plan.heads),
    )
    return moved, plan


def _on_page_0(lengths: np.ndarray, starts: np.ndarray, width: int, num_tokens: int) -> Ragged:
    """Return rows whose tokens all lie on page 0: where pages lie changes no traffic."""
    tables = jnp.zeros((len(lengths), width), jnp.int32)
    kept = jnp.zeros(num_tokens, jnp.int32)
    return Ragged(
        tables, jnp.asarray(lengths), jnp.asarray(starts), jnp.zeros(2, jnp.int32), kept, kept
    )


def spread(context: int, rows: int, page_size: int) -> list[int]:
    """Return cached tokens of rows around this context, whose last pages are evenly filled."""
    return [context - 1 - (row * page_size // rows) % page_size for row in range(rows)]


def main() -> None:
    what = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention_traffic", description=what
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    head = (
        "shape",
        "rows",
        "context",
        "pages, MiB",
        "all, MiB",
        "over the floor",
        "dead part of pages",
    )
    table = Table(*head)
    found = []
    for (name, (layout, heads)), rows, context in (
        (shape, rows, context) for shape in SHAPES.items() for rows in ROWS for context in CONTEXTS
    ):
        options = Options(layout, 1.0, max_row_tokens=1)
        moved, _ = traffic(options, heads, spread(context, rows, layout.page_size), [1] * rows)
        sizes = (f"{moved.pages / 2**20:,.1f}", f"{moved.total / 2**20:,.1f}")
        shares = (f"{moved.over_floor:.3f}", f"{moved.dead / moved.floor:.1%}")
        table.add_row(name, str(rows), str(context), *sizes, *shares)
        found.append(
            {
                "shape": name,
                "rows": rows,
                "context": context,
                **asdict(moved),
                "over_floor": moved.over_floor,
            }
        )
    Console().print(table)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        cells = [[str(cell) for cell in column.cells] for column in table.columns]
        lines = [
            "| " + " | ".join(line) + " |"
            for line in (head, ["---"] * len(head), *zip(*cells, strict=True))
        ]
        args.out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
