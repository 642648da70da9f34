"""Paged attention alone, as the compiler for an H200 builds it.

Pages are updated in place, nothing large is allocated beside, and registers suffice.

Run by `make deviceless`, in an environment that has these compilers; skipped in any other.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from _pytest.mark.structures import ParameterSet

from jaxserve.pallas_kernels.paged_attention import gpu
from jaxserve.pallas_kernels.paged_attention.gpu import SMALL_STEP
from jaxserve.pallas_kernels.paged_attention.gpu_plan import Plan, few_plan, few_tokens, many_plan
from jaxserve.plan.hlo.inspection import find_copies
from jaxserve.plan.hlo.parser import parse
from tests.deviceless.attention_step import Step, compile_for
from tests.deviceless.pallas_calls import pallas_calls

LATENT = {"kv_heads": 1, "head_dim": 576, "value_dim": 512}
SHAPES = [
    Step(),
    Step(heads=4, kv_heads=1),
    Step(heads=32, kv_heads=32),
    Step(heads=28, kv_heads=4),
    Step(heads=12, kv_heads=12, head_dim=64),
    Step(head_dim=64),
    Step(head_dim=192),
    Step(heads=16, kv_heads=8, head_dim=256),
    Step(window=1024),
    Step(softcap=50.0),
    Step(sinks=True),
    Step(head_dim=64, heads=64, sinks=True, window=128, lse=True),
    Step(page_size=128),
    Step(page_size=16),
    Step(stored="int8"),
    Step(stored="float8_e4m3fn", page_size=128),
    Step(heads=16, **LATENT),
    Step(heads=128, **LATENT),
    Step(heads=130, kv_heads=2),
    Step(rows=1, width=2048),
    Step(rows=64, width=2048, chunk=8192),
    Step(rows=256, chunk=2048),
    Step(width=2048, chunk=64),
]
STEPS = [*SHAPES, *(replace(shape, most=None) for shape in SHAPES), Step(most=5), Step(most=40)]
QUICK = [Step(), Step(most=None)]
SPILLED = re.compile(r"(\d+) bytes spill stores")


def cases() -> Iterator[ParameterSet]:
    for step in STEPS:
        yield pytest.param(step, marks=[] if step in QUICK else [pytest.mark.slow], id=str(step))


def plans(step: Step) -> list[Plan]:
    """Return the plan of each kernel call of a step."""
    options = step.options("NVIDIA H200")
    few = few_tokens(options, step.heads)
    context = step.width * step.page_size
    if (step.most or step.tokens) <= few or step.tokens <= SMALL_STEP * few:
        tokens = min(step.most or few, few)
        tiles = step.rows if step.most == 1 else step.tokens // tokens + min(step.rows, step.tokens)
        return [few_plan(options, step.heads, tiles, tokens, context)]
    return [few_plan(options, step.heads, step.rows, 1, context), many_plan(options, step.heads)]


def spill_bound(step: Step) -> int:
    """Return the bytes that a thread may spill.

    Half of all registers hold a result of 256 columns, and a latent result is written out from
    there. Fetching small pages takes many registers for addresses.
    """
    if step.value_dim is not None:
        return 300
    return 32 if step.head_dim == 256 or step.page_size < 64 else 0


def temporaries_bound(step: Step) -> int:
    """Bound the temporaries of a step.

    For each kernel call, queries by tile and results by part, both with padding; by token, queries
    and twice the results; and 4 MiB.
    """
    by_tile = 0
    for plan in plans(step):
        tiles = step.tokens // plan.tokens + step.rows
        rows = tiles * plan.heads * plan.rows * step.head_dim
        by_tile += rows * (2 + plan.splits * (4 if plan.splits > 1 or plan.is_latent else 2))
    return by_tile + 3 * step.tokens * step.heads * step.head_dim * 4 + 2**22


@pytest.mark.deviceless
@pytest.mark.parametrize("step", list(cases()))
def test_in_place_and_without_copies(
    step: Step, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled, _ = compile_for(gpu, "h200", step)
    module = parse(compiled.as_text() or "")
    memory = compiled.memory_analysis()
    pools = jax.tree.leaves(step.pages(gpu))
    assert memory is not None
    assert memory.alias_size_in_bytes >= sum(
        pool.size * jnp.dtype(pool.dtype).itemsize for pool in pools
    )
    assert memory.temp_size_in_bytes < temporaries_bound(step)
    assert pallas_calls(module) == {"paged_attention": len(plans(step))}
    assert not find_copies(module, set(), {pool.size for pool in pools})
    spilled = [int(found) for found in SPILLED.findall("".join(capfd.readouterr()))]
    assert spilled or step != QUICK[0], (
        "the assembler's report; a kernel that was compiled before has none"
    )
    assert max(spilled, default=0) <= spill_bound(step)
