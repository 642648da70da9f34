"""Bytes that a decode step of an H200 and of a v6e moves, over the least that it has to.

Nothing runs on a device.

    python -m benchmarks.decode_bytes --out FILE.json

In an environment with the compilers (`make deviceless-full`). A step of 64 rows of Llama-3.1-8B in
bfloat16 at contexts of 512 to 8,192 tokens. The floor is every weight once and every live token's
keys and values once. The step has the weights once (benchmarks/results/deviceless.md: no weight is
copied), what its attention kernel copies, and the arrays that the compiled step makes, each written
once and read once. Of these, loops count once and all branches count, and those that stay in a TPU
core's own memory do not. Caches are not counted, and an array of which a kernel writes a part
counts whole.
"""

import argparse
import json
import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention_traffic import spread, traffic
from benchmarks.device import versions
from benchmarks.deviceless import BF16, CONTEXT, ROWS, compiler_of, lowering_of
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.kernels.choice import attention_options
from jaxserve.engine.device.lowering import Lowering
from jaxserve.pallas_kernels.paged_attention.api import Options
from jaxserve.pallas_kernels.paged_attention.gpu_plan import few_plan
from jaxserve.pallas_kernels.paged_attention.gpu_work import units_of
from jaxserve.pallas_kernels.paged_attention.tiles import Tiles
from jaxserve.plan.hlo.inspection import CORE_MEMORY, bodies_that_run, sizes_of
from jaxserve.plan.hlo.parser import Instruction, Module, elements, parse
from jaxserve.plan.roofline import Case, work_of_weights
from jaxserve.sharding.aot_devices import ENVIRONMENT

MODEL = "llama3.1-8b"
CHIPS = ("h200", "v6e")
CONTEXTS = (512, 2048, 8192)
STEP = Bucket("decode", ROWS, ROWS)
ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\](\{[^}]*\})?")
WORKSPACE = ("s8", "u8")  # results of a library's product beside its sums


def bytes_made(module: Module, pages: set[int]) -> int:
    """Return the bytes of the arrays that a step's instructions make, without pages.

    Args:
        module: Compiled step.
        pages: Numbers of elements of pools, which are updated in place.
    """
    made = [i for body in bodies_that_run(module) for i in body.values()]
    return sum(_made(i, pages) for i in made if i.makes_arrays or i.op == "custom-call")


def _made(i: Instruction, pages: set[int]) -> int:
    if i.op == "copy" and CORE_MEMORY.search(i.result):  # of a weight that is read ahead
        return 0
    found = 0
    for kind, bits, dims, layout in ARRAY.findall(i.result):
        is_workspace = i.op == "custom-call" and f"{kind}{bits}" in WORKSPACE
        if not (is_workspace or CORE_MEMORY.search(layout) or elements(dims) in pages):
            found += elements(dims) * int(bits or 8) // 8
    return found


def copied_by_attention(chip: str, options: Options, heads: int, lengths: list[int]) -> int:
    """Return the bytes of pages, queries and new tokens that one layer's kernel copies.

    Args:
        heads: Query heads.
        lengths: Positions of each row.
    """
    cached = [length - 1 for length in lengths]
    if chip != "h200":
        moved, _ = traffic(options, heads, cached, [1] * len(lengths))
        return moved.pages + moved.inserted + moved.queries + moved.new
    rows = jnp.arange(len(lengths))
    plan = few_plan(options, heads, len(lengths), 1, CONTEXT)
    ones = jnp.ones_like(rows)
    tiles = Tiles(rows, jnp.asarray(cached), ones, rows, ones.sum(keepdims=True), rows, 1)
    units, _ = units_of(tiles, plan)
    live = int(units.live[0])
    blocks = -(-np.asarray(units.end - units.begin)[:live] // plan.block_tokens)
    layout = options.layout
    positions = int(blocks.sum()) * plan.block_tokens
    queries = live * plan.heads * plan.rows * layout.head_dim * layout.dtype.itemsize
    new = 2 * len(lengths) * layout.token_bytes  # read, and written into pages
    return positions * layout.token_bytes * plan.sharing + queries + new


def count(chip: str) -> list[dict[str, Any]]:
    """Compile the step for a chip, and return its bytes at each context."""
    lowering = lowering_of(MODEL, chip, 1)
    text = lowering.step(STEP).compile().as_text() or ""
    made = 2 * bytes_made(parse(text), sizes_of([lowering.state.kept]))
    return [_row(chip, lowering, made, context) for context in CONTEXTS]


def _row(chip: str, lowering: Lowering, made: int, context: int) -> dict[str, Any]:
    spec = lowering.spec
    config = lowering.config
    (group,) = spec.page_groups()
    options = attention_options(spec, group, lowering.mesh, config.page_size, BF16, 1)
    lengths = [cached + 1 for cached in spread(context, ROWS, config.page_size)]
    layers = len(group.layers)
    weights = round(work_of_weights(spec, BF16, Case("decode", ROWS, 0, ROWS)).bytes)
    attention = layers * copied_by_attention(chip, options, spec.num_heads, lengths)
    floor = weights + layers * sum(lengths) * options.layout.token_bytes
    return {
        "commit": versions()["commit"],
        "jax": version("jax"),
        "compiler": compiler_of(chip),
        "model": MODEL,
        "chip": chip,
        "step": str(STEP),
        "context": context,
        "weights": weights,
        "attention": attention,
        "arrays": made,
        "floor": floor,
        "over_floor": (weights + attention + made) / floor,
    }


def main() -> None:
    what = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode_bytes", description=what)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)  # libtpu reads its settings from there
    jax.config.update("jax_platforms", "cpu")
    found = [row for chip in CHIPS for row in count(chip)]
    for row in found:
        print(row)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
