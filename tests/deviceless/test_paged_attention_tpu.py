"""Paged attention alone, as the compilers for TPUs build it.

Pages are updated in place, nothing large is allocated beside, and no pool is copied.

Run by `make deviceless`, in an environment that has these compilers; skipped in any other.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from _pytest.mark.structures import ParameterSet

from jaxserve.pallas_kernels.paged_attention import tpu
from jaxserve.pallas_kernels.paged_attention.lanes import TILE_LANES
from jaxserve.pallas_kernels.paged_attention.tpu_plan import Plan, plan_of
from jaxserve.plan.hlo.inspection import find_copies
from jaxserve.plan.hlo.parser import Module, parse
from jaxserve.sharding.chips import CHIPS
from tests.deviceless.attention_step import Step, compile_for
from tests.deviceless.pallas_calls import pallas_calls

TPUS = [name for name, chip in CHIPS.items() if chip.platform == "tpu"]
LATENT = {"kv_heads": 1, "head_dim": 576, "value_dim": 512}
SHAPES = [
    Step(),
    Step(heads=4, kv_heads=1),
    Step(heads=32, kv_heads=32),
    Step(heads=12, kv_heads=12, head_dim=64),
    Step(head_dim=64),
    Step(head_dim=80),
    Step(head_dim=96),
    Step(heads=16, kv_heads=8, head_dim=256),
    Step(dtype="float32", stored="float32"),
    Step(stored="int8", page_size=128),
    Step(stored="float8_e4m3fn", page_size=128),
    Step(heads=4, kv_heads=1, stored="int8", page_size=128),
    Step(heads=16, **LATENT),
    Step(heads=128, **LATENT),
    Step(heads=16, stored="int8", page_size=128, **LATENT),
    Step(window=1024),
    Step(softcap=50.0),
    Step(sinks=True),
    Step(head_dim=64, heads=64, sinks=True, window=128, lse=True),
    Step(lse=True),
    Step(page_size=16),
    Step(page_size=256),
    Step(rows=8, width=2048),
    Step(rows=64, width=2048, chunk=8192),
]
STEPS = [
    *SHAPES,
    *(replace(shape, most=None) for shape in SHAPES),
    Step(most=5),
    Step(most=5, heads=16, **LATENT),
    Step(most=5, stored="int8", page_size=128),
]
QUICK = [Step(), Step(most=None), Step(heads=16, **LATENT)]


def cases() -> Iterator[ParameterSet]:
    for step in STEPS:
        for chip in TPUS:
            marks = [] if step in QUICK else [pytest.mark.slow]
            yield pytest.param(chip, step, marks=marks, id=f"{chip}-{step}")


def temporaries_bound(step: Step, plan: Plan) -> int:
    """Bound the temporaries of a step.

    Queries and results by token; queries and results by tile (with lse, a number per 128 lanes) and
    new tokens by page, both twice, since they are gathered and then transposed; and 4 MiB. Rows of
    tiles are padded to 16.
    """
    layout = step.layout
    lanes = plan.lanes
    itemsize = jnp.dtype(step.dtype).itemsize
    by_token = step.tokens * step.heads * (step.head_dim + layout.out_dim) * itemsize
    rows = (step.tokens // plan.tokens + step.rows) * step.kv_heads * -(-plan.rows // 16) * 16
    by_tile = rows * ((lanes.keys + lanes.value_lanes) * itemsize + step.lse * TILE_LANES * 4)
    in_pages = (step.tokens + 2 * step.rows * step.page_size) * step.kv_heads
    by_page = in_pages * (lanes.total * layout.dtype.itemsize + layout.scaled * 2 * 4)
    return by_token + 2 * (by_tile + by_page) + 2**22


def copied_to_core(module: Module, pools: set[int]) -> list[str]:
    """Name the instructions that bring a whole pool to a core's own memory.

    pools: numbers of elements, by which pools are known.
    """
    arrays = re.compile(r"\w+\[([\d,]*)\]\{[^}]*S\(\d\)")
    return [
        i.name
        for body in module.values()
        for i in body.values()
        if pools
        & {math.prod(int(n) for n in dims.split(",") if n) for dims in arrays.findall(i.result)}
    ]


@pytest.mark.deviceless
@pytest.mark.parametrize(("chip", "step"), list(cases()))
def test_in_place_and_without_copies(chip: str, step: Step) -> None:
    compiled, options = compile_for(tpu, chip, step)
    plan = plan_of(options, step.heads, step.rows, step.tokens, step.width)
    module = parse(compiled.as_text() or "")
    memory = compiled.memory_analysis()
    pools = jax.tree.leaves(step.pages(tpu))
    assert memory is not None
    assert memory.alias_size_in_bytes >= sum(pool.size * pool.dtype.itemsize for pool in pools)
    assert memory.temp_size_in_bytes < temporaries_bound(step, plan)
    writes = {} if step.most == 1 else {"page_write": len(pools)}
    assert pallas_calls(module) == {"paged_attention": 1, **writes}
    sizes = {pool.size for pool in pools}
    assert not find_copies(module, set(), sizes) and not copied_to_core(module, sizes)
