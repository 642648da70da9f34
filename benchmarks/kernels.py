"""Speed of the implementations of paged attention, beside the device's limits.

Figures are bytes and FLOP per second.

    python -m benchmarks.kernels [--heads 32 --kv-heads 8 --head-dim 128] [--out FILE]

One layer of a model, alone: decode over rows and context, prefill of one prompt behind a cached
prefix. Bytes are those of the live pages, read once; FLOP those of both products. Every
implementation that takes a case is timed, in turns.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.device import about, measure_limits, seconds
from jaxserve.pallas_kernels.dispatch import CANDIDATES, IMPLEMENTATIONS
from jaxserve.pallas_kernels.paged_attention.api import (
    Demand,
    KernelError,
    Layout,
    Options,
    PagedAttention,
    Ragged,
)
from jaxserve.plan.topology import Limits

PAGE_SIZE = 64
DRAFT = 5  # tokens of a row whose draft is verified


@dataclass(frozen=True)
class Case:
    """A step: `rows` rows of `tokens` queries each, the last of `context` positions."""

    rows: int
    tokens: int
    context: int


CASES = [
    Case(rows, 1, context)
    for rows, context in ((1, 2048), (8, 8192), (64, 2048), (256, 2048), (1, 131072))
]
CASES += [Case(64, DRAFT, 2048), Case(1, 2048, 2048), Case(1, 2048, 8192), Case(1, 2048, 32768)]


@dataclass(frozen=True)
class Result:
    case: Case
    implementation: str
    microseconds: float
    bytes_per_second: float
    flops: float


def ragged_for(case: Case) -> Ragged:
    """Return rows whose pages lie in random order."""
    width = -(-case.context // PAGE_SIZE)
    tables = (
        np.random.default_rng(0)
        .permutation(case.rows * width)
        .astype(np.int32)
        .reshape(case.rows, width)
    )
    position = np.tile(np.arange(case.context - case.tokens, case.context), case.rows)
    row = np.repeat(np.arange(case.rows), case.tokens)
    split = np.array([case.rows if case.tokens == 1 else 0, case.rows], np.int32)
    return Ragged(
        tables=jnp.asarray(tables),
        lengths=jnp.full(case.rows, case.context, jnp.int32),
        starts=jnp.arange(case.rows + 1, dtype=jnp.int32) * case.tokens,
        split=jnp.asarray(split),
        page=jnp.asarray(tables[row, position // PAGE_SIZE]),
        offset=jnp.asarray(position % PAGE_SIZE, jnp.int32),
    )


def attention(
    kernel: PagedAttention, case: Case, heads: int, options: Options
) -> Callable[[], jax.Array]:
    """Return a call of an implementation.

    The call owns its pages: they are donated from call to call, as in a step.
    """
    layout = options.layout
    ragged = ragged_for(case)
    q, new = (
        jnp.ones((case.rows * case.tokens, count, layout.head_dim), layout.dtype)
        for count in (heads, layout.kv_heads)
    )

    def step(pages: Any, q: jax.Array, new: jax.Array, ragged: Ragged) -> tuple[Any, jax.Array]:
        done = kernel.attend(q, new, new, pages, ragged, options)
        return done.pages, done.out

    compiled = jax.jit(step, donate_argnums=0)
    pages = [kernel.allocate(int(ragged.tables.size), layout)]

    def run() -> jax.Array:
        pages[0], out = compiled(pages[0], q, new, ragged)
        return out

    return run


def measure(case: Case, heads: int, layout: Layout, names: list[str]) -> list[Result]:
    most = case.tokens if case.tokens <= DRAFT else None
    width = -(-case.context // PAGE_SIZE)
    kind = jax.devices()[0].device_kind
    options = Options(layout, layout.head_dim**-0.5, max_row_tokens=most, device_kind=kind)
    demand = Demand(heads, case.rows, width, layout.dtype, kind)
    read = 2 * case.rows * case.context * layout.kv_heads * layout.head_dim * layout.dtype.itemsize
    seen = sum(range(case.context - case.tokens + 1, case.context + 1)) * case.rows
    flop = 4 * seen * heads * layout.head_dim
    results = []
    for name in names:
        kernel = IMPLEMENTATIONS[name]
        try:
            kernel.check(options, demand)
        except KernelError as error:
            Console(stderr=True).print(f"{name}: {error}")
            continue
        each = seconds(attention(kernel, case, heads, options), 5)
        results.append(Result(case, name, round(each * 1e6, 1), read / each, flop / each))
    return results


def show(results: list[Result], limits: Limits) -> None:
    table = Table(
        "rows",
        "tokens",
        "context",
        "implementation",
        "us",
        "GB/s",
        "of memory",
        "GFLOP/s",
        "of a product",
    )
    for r in results:
        numbers = (r.bytes_per_second / 1e9, r.bytes_per_second / limits.bandwidth)
        work = (r.flops / 1e9, r.flops / limits.flops)
        cells = (
            r.case.rows,
            r.case.tokens,
            r.case.context,
            r.implementation,
            f"{r.microseconds:,.0f}",
        )
        table.add_row(
            *map(str, cells),
            f"{numbers[0]:,.1f}",
            f"{numbers[1]:.0%}",
            f"{work[0]:,.0f}",
            f"{work[1]:.0%}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--most-tokens", type=int, default=2**20, help="leave out cases of more positions than this"
    )
    parser.add_argument(
        "--implementation",
        action="append",
        choices=tuple(IMPLEMENTATIONS),
        help="default: all that this device has",
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON, after every case")
    args = parser.parse_args()
    layout = Layout(args.kv_heads, args.head_dim, PAGE_SIZE, jnp.dtype(args.dtype))
    limits = measure_limits(layout.dtype)
    names = args.implementation or list(CANDIDATES[jax.devices()[0].platform])
    results: list[Result] = []
    for case in CASES:
        if case.rows * case.context > args.most_tokens:
            continue
        results += measure(case, args.heads, layout, names)
        if args.out:
            shape = {
                "heads": args.heads,
                "kv_heads": args.kv_heads,
                "head_dim": args.head_dim,
                "dtype": args.dtype,
            }
            account = (
                about()
                | shape
                | {"limits": asdict(limits), "results": [asdict(r) for r in results]}
            )
            args.out.write_text(json.dumps(account, indent=1) + "\n")
    show(results, limits)


if __name__ == "__main__":
    main()
