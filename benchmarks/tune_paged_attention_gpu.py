"""Search for the sizes that suit the Hopper kernel, timed on the GPU at hand.

Sizes are those of blocks, parts and thread blocks.

    python -m benchmarks.tune_paged_attention_gpu [--shape 'K8 G4 H128' ...] [--out FILE]

Per shape of a shard two sizes are found: of the walk of rows with few tokens, by 8 and by 64 rows
that decode at 2,048 tokens and by one at 32,768; of that of rows with many, by a prompt of 2,048
tokens alone and behind 6,144. The best is the one whose times, each over the best of its step, have
the smallest sum, unless the default is within 2 % of it. FILE gets what differs from the defaults,
beside what pallas_kernels/tuned/paged_attention_gpu.json, whose place it may take, has already. Two
minutes a shape.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks.device import about, seconds
from benchmarks.kernels import PAGE_SIZE, Case, attention
from jaxserve.pallas_kernels.paged_attention import gpu
from jaxserve.pallas_kernels.paged_attention.api import Attended, KernelError, Layout, Options
from jaxserve.pallas_kernels.paged_attention.gpu_plan import FEW, MANY, Sizes, shape_of

SHAPES = [(k, g, 128) for k, g in ((8, 4), (4, 4), (2, 4), (1, 4), (8, 8), (1, 8), (8, 2))] + [
    (8, 4, 64),
    (8, 2, 256),
]
STEPS = {
    "few": [Case(8, 1, 2048), Case(64, 1, 2048), Case(1, 1, 32768)],
    "many": [Case(1, 2048, 2048), Case(1, 2048, 8192)],
}
DEFAULTS = {"few": FEW, "many": MANY}
GAIN = 0.02  # of time, below which the default stays
TABLE = Path("pallas_kernels/tuned/paged_attention_gpu.json")


def candidates(kind: str) -> Iterator[Sizes]:
    if kind == "few":
        for block, per_core, split in product((64, 128), (1, 2, 3), (128, 256, 512)):
            yield FEW._replace(block_tokens=block, per_core=per_core, split_tokens=split)
    else:
        for warpgroups, block in product((2, 3), (64, 128, 192)):
            yield MANY._replace(warpgroups=warpgroups, block_tokens=block)


def timed(kind: str, sizes: Sizes, case: Case, heads: int, layout: Layout) -> float:
    """Return the seconds of one layer's attention; KernelError where the sizes do not fit."""
    options = Options(
        layout,
        layout.head_dim**-0.5,
        max_row_tokens=1 if case.tokens == 1 else None,
        device_kind=jax.devices()[0].device_kind,
    )

    def attend(*operands: Any) -> Attended:
        return gpu.attend(*operands, **{f"{kind}_sizes": sizes})

    kernel: Any = SimpleNamespace(attend=attend, allocate=gpu.allocate)
    return seconds(attention(kernel, case, heads, options), 5)


def best(
    kind: str, heads: int, layout: Layout, cases: Sequence[Case]
) -> tuple[Sizes, list[float], list[float]]:
    """Return the sizes, the times with them, and the default's."""
    found: dict[Sizes, list[float]] = {}
    for sizes in [DEFAULTS[kind], *candidates(kind)]:
        try:
            found.setdefault(sizes, [timed(kind, sizes, case, heads, layout) for case in cases])
        except (KernelError, ValueError, jax.errors.JaxRuntimeError) as error:
            Console(stderr=True).print(
                f"{kind} {tuple(sizes)}: {str(error).splitlines()[0][:100]}", markup=False
            )
    least = [min(times) for times in zip(*found.values(), strict=True)]

    def cost(sizes: Sizes) -> float:
        return sum(time / best for time, best in zip(found[sizes], least, strict=True)) / len(cases)

    chosen = min(found, key=cost)
    default = DEFAULTS[kind]
    if cost(chosen) > (1 - GAIN) * cost(default):
        chosen = default
    return chosen, found[chosen], found[default]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune_paged_attention_gpu",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--shape", action="append", help="such as 'K8 G4 H128'; default: all")
    parser.add_argument("--out", type=Path, help="write the table, after every shape")
    args = parser.parse_args()
    device = about()
    table = Table("shape", "walk", *Sizes._fields, "us", "with the defaults")
    account = json.loads(TABLE.read_text())
    for kv_heads, groups, dim in SHAPES:
        if args.shape and f"K{kv_heads} G{groups} H{dim}" not in args.shape:
            continue
        layout = Layout(kv_heads, dim, PAGE_SIZE, jnp.dtype(jnp.bfloat16))
        for kind, cases in STEPS.items():
            sizes, times, before = best(kind, kv_heads * groups, layout, cases)
            shown = (" ".join(f"{1e6 * x:.0f}" for x in each) for each in (times, before))
            table.add_row(shape_of(layout, groups), kind, *map(str, sizes), *shown)
            default = DEFAULTS[kind]
            other = {
                key: value
                for key, value in sizes._asdict().items()
                if value != getattr(default, key)
            }
            held = (
                account["sizes"]
                .setdefault(device["device"], {})
                .setdefault(shape_of(layout, groups), {})
            )
            held.pop(kind, None)
            held.update({kind: other} if other else {})
            if args.out:
                account["note"] = f"By python -m benchmarks.tune_paged_attention_gpu, {device}."
                args.out.write_text(json.dumps(account, indent=1) + "\n")
    Console().print(table)


if __name__ == "__main__":
    main()
