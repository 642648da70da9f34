"""What the real compilers of TPUs say of paged attention alone: in place, nothing large beside, no pool copied.

Run by `make deviceless`, in an environment that has these compilers; skipped in any other.
"""

import importlib.util
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from _pytest.mark.structures import ParameterSet
from jax.sharding import PartitionSpec

from jaxserve.engine.inspection import Module, find_copies, parse
from pallas_kernels.paged_attention import tpu
from pallas_kernels.paged_attention.api import Attended, Demand, Layout, Options, Pages, Ragged
from pallas_kernels.paged_attention.lanes import LANES
from pallas_kernels.paged_attention.tpu_plan import Plan, plan_of
from sharding import absent
from sharding.mesh import MeshSpec, device_kind
from sharding.rules import replicated
from tests.deviceless.pallas_calls import pallas_calls

CHIPS = [name for name, chip in absent.CHIPS.items() if chip.platform == "tpu"]
CACHE = 64 * 4099  # tokens of a pool, which no VMEM holds


@dataclass(frozen=True)
class Step:
    """Of one shard: Llama-3-8B's heads, unless said otherwise. dtype: of queries, keys and values; stored: of pages."""

    most: int | None = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    value_dim: int | None = None
    page_size: int = 64
    dtype: str = "bfloat16"
    stored: str = "bfloat16"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    lse: bool = False
    rows: int = 16
    width: int = 128  # entries of a page table
    chunk: int = 512  # tokens of a step that is no decode step

    def __str__(self) -> str:
        """What is not as usual."""
        kind = {1: "decode", None: "ragged"}.get(self.most, f"verify{self.most}")
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return "-".join([kind] + [f"{name}{value}" for name, value in changed.items() if name != "most"])

    @property
    def tokens(self) -> int:
        return self.rows * self.most if self.most else self.chunk

    @property
    def layout(self) -> Layout:
        return Layout(self.kv_heads, self.head_dim, self.page_size, jnp.dtype(self.stored), self.value_dim)

    def options(self, kind: str) -> Options:
        """On a chip of this kind."""
        scale = self.head_dim**-0.5
        return Options(self.layout, scale, self.window, self.softcap, self.most, self.lse, device_kind=kind)

    def pages(self) -> Pages:
        return jax.eval_shape(partial(tpu.allocate, CACHE // self.page_size, self.layout))

    def arguments(self) -> tuple:
        """Shapes and dtypes: q, k, v, pages, ragged, sinks."""

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        rows, tokens = self.rows, self.tokens
        q, k = (jax.ShapeDtypeStruct((tokens, n, self.head_dim), self.dtype) for n in (self.heads, self.kv_heads))
        ragged = Ragged(ints(rows, self.width), ints(rows), ints(rows + 1), ints(2), ints(tokens), ints(tokens))
        sinks = jax.ShapeDtypeStruct((self.heads,), jnp.float32) if self.sinks else None
        return q, k, None if self.value_dim else k, self.pages(), ragged, sinks


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
        for chip in CHIPS:
            marks = [] if step in QUICK else [pytest.mark.slow]
            yield pytest.param(chip, step, marks=marks, id=f"{chip}-{step}")


def compile_for(chip: str, step: Step) -> tuple[jax.stages.Compiled, Plan]:
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu (make deviceless)")
    mesh = MeshSpec().build(absent.devices(chip, 1))
    options = step.options(device_kind(mesh))
    tpu.check(options, Demand(step.heads, step.rows, step.width, jnp.dtype(step.dtype), device_kind(mesh)))

    def attend(*arguments: Any) -> Attended:
        *others, sinks = arguments
        return tpu.attend(*others, options, sinks)

    on_chip = jax.shard_map(attend, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    arguments = jax.tree.map(lambda x: x.update(sharding=replicated(mesh)), step.arguments())
    compiled = jax.jit(on_chip, donate_argnums=3).lower(*arguments).compile()
    return compiled, plan_of(options, step.heads, step.rows, step.tokens, step.width)


def temporaries_bound(step: Step, plan: Plan) -> int:
    """Queries and results by token; by tile (with lse, a number per 128 lanes), and new tokens by page, twice; 4 MiB.

    Twice: they are gathered, then turned over. Rows of tiles are filled up to 16.
    """
    layout, lanes, itemsize = step.layout, plan.lanes, jnp.dtype(step.dtype).itemsize
    by_token = step.tokens * step.heads * (step.head_dim + layout.out_dim) * itemsize
    rows = (step.tokens // plan.tokens + step.rows) * step.kv_heads * -(-plan.rows // 16) * 16
    by_tile = rows * ((lanes.keys + lanes.value_lanes) * itemsize + step.lse * LANES * 4)
    in_pages = (step.tokens + 2 * step.rows * step.page_size) * step.kv_heads
    by_page = in_pages * (lanes.total * layout.dtype.itemsize + layout.scaled * 2 * 4)
    return by_token + 2 * (by_tile + by_page) + 2**22


def moved(module: Module, pools: set[int]) -> list[str]:
    """Names of the instructions that bring a whole pool, known by its number of elements, to a core's own memory."""
    arrays = re.compile(r"\w+\[([\d,]*)\]\{[^}]*S\(\d\)")
    return [
        i.name
        for body in module.values()
        for i in body.values()
        if pools & {math.prod(int(n) for n in dims.split(",") if n) for dims in arrays.findall(i.result)}
    ]


@pytest.mark.deviceless
@pytest.mark.parametrize(("chip", "step"), list(cases()))
def test_in_place_and_without_copies(chip: str, step: Step) -> None:
    compiled, plan = compile_for(chip, step)
    module, memory, pools = parse(compiled.as_text() or ""), compiled.memory_analysis(), jax.tree.leaves(step.pages())
    assert memory is not None
    assert memory.alias_size_in_bytes >= sum(pool.size * pool.dtype.itemsize for pool in pools)
    assert memory.temp_size_in_bytes < temporaries_bound(step, plan)
    writes = {} if step.most == 1 else {"page_write": len(pools)}
    assert pallas_calls(module) == {"paged_attention": 1, **writes}
    sizes = {pool.size for pool in pools}
    assert not find_copies(module, set(), sizes) and not moved(module, sizes)
