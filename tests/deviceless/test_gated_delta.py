"""Kernels of the gated delta rule, as the compilers for TPUs and an H200 build them.

Decode steps for all chips, and prompts for the H200; those of TPUs are part of test_state_steps.py.
Pools of states are updated in place, and nothing of their size is allocated.

Run by `make deviceless`, in an environment that has these compilers; skipped in any other.
"""

import importlib.util
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from _pytest.mark.structures import ParameterSet
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from jaxserve.pallas_kernels.dispatch import RECURRENCES
from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.pallas_kernels.gated_delta.api import (
    AXES,
    DeltaStates,
    Demand,
    GatedDelta,
    Heads,
    Options,
    Tokens,
)
from jaxserve.pallas_kernels.short_convolution.api import Chunks
from jaxserve.plan.hlo.inspection import find_copies, parse
from jaxserve.sharding import aot_devices as absent
from jaxserve.sharding.chips import CHIPS
from jaxserve.sharding.mesh import MeshSpec, device_kind
from tests.deviceless.grouped_product import COMPILERS
from tests.deviceless.pallas_calls import pallas_calls

# Of one shard: Qwen3.5-27B whole and over four devices, Qwen3-Next-80B, Qwen3.5-397B.
LARGEST = Demand(8, 64, 128, 128, 4)  # of a chip that takes fewer value heads, those
STATES = {
    "27b": Demand(16, 3, 128, 128, 4),
    "27b-over-4": Demand(4, 3, 128, 128, 4),
    "next-80b": Demand(16, 2, 128, 128, 4),
    "397b": Demand(16, 4, 128, 128, 4),
    "two-taps": Demand(16, 3, 128, 128, 2),
    "largest": LARGEST,
}
ROWS = (1, 64)
PROMPTS = ((512, 16), (1536, 64))  # tokens and rows of a step
SPILT = re.compile(r"(\d+) bytes spill stores")


def cases() -> Iterator[ParameterSet]:
    for chip in CHIPS:
        for name, demand in STATES.items():
            for rows in ROWS:
                marks = [] if (name, rows) == ("27b", 64) else [pytest.mark.slow]
                yield pytest.param(chip, demand, rows, marks=marks, id=f"{chip}-{name}-{rows}")


@pytest.mark.deviceless
@pytest.mark.parametrize(("chip", "demand", "rows"), list(cases()))
def test_states_are_updated_in_place(
    chip: str,
    demand: Demand,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    platform = CHIPS[chip].platform
    if importlib.util.find_spec(COMPILERS[platform]) is None:
        pytest.skip(f"needs {COMPILERS[platform]} (make deviceless)")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    mesh = MeshSpec().build(absent.devices(chip, 1))
    kernel = RECURRENCES[platform]
    options = Options(device_kind(mesh))
    is_published = demand is not LARGEST
    if not is_published:
        demand = largest(kernel, options)
    kernel.check(options, demand)
    operands = arguments(demand, rows, slots=rows + 27)
    compiled = compiled_on(mesh, partial(kernel.decode, options=options), operands, donated=2)
    module = parse(compiled.as_text() or "")
    memory = compiled.memory_analysis()
    assert memory is not None
    k, r, d, v, _ = demand
    pools = {x.size for x in operands[2]}
    states = rows * k * r * d * v
    assert memory.alias_size_in_bytes >= 4 * sum(pools)
    # Answers of the rows, and their rates in tiles of 128 lanes.
    small = rows * demand.k * (demand.r * demand.v + 2 * 128) * 4
    assert memory.temp_size_in_bytes < small + 2**20
    assert pallas_calls(module) == {"gated_delta": 1}
    assert not find_copies(module, set(), {*pools, states})
    if platform == "gpu":
        report = "".join(capfd.readouterr())
        spilt = max(map(int, SPILT.findall(report)), default=0)
        assert not (spilt and is_published) and "serialized" not in report


def prompt_cases() -> Iterator[ParameterSet]:
    for name, demand in STATES.items():
        for tokens, rows in PROMPTS:
            marks = [] if (name, rows) == ("27b", 16) else [pytest.mark.slow]
            yield pytest.param(demand, tokens, rows, marks=marks, id=f"{name}-{tokens}-{rows}")


@pytest.mark.deviceless
@pytest.mark.parametrize(("demand", "tokens", "rows"), list(prompt_cases()))
def test_prompts_are_advanced_in_place_on_an_h200(
    demand: Demand,
    tokens: int,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if importlib.util.find_spec(COMPILERS["gpu"]) is None:
        pytest.skip(f"needs {COMPILERS['gpu']} (make deviceless)")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    mesh = MeshSpec().build(absent.devices("h200", 1))
    kernel = RECURRENCES["gpu"]
    options = Options(device_kind(mesh))
    kernel.check(options, demand)
    operands = prompts(demand, tokens, rows, slots=rows + 27)
    compiled = compiled_on(mesh, partial(kernel.prefill, options=options), operands, donated=1)
    module = parse(compiled.as_text() or "")
    memory = compiled.memory_analysis()
    assert memory is not None
    k, r, d, v, _ = demand
    pool = operands[1].size
    assert memory.alias_size_in_bytes >= 4 * pool
    blocks = tokens // 64 + rows
    triangles = 2 * blocks * k * r * 3 * 64 * 64 * 2
    answers = blocks * 64 * k * r * v * 4
    moved = (tokens + 8 * rows + 64) * k * (2 * 3 * d * 2 + r * v * 4)
    assert memory.temp_size_in_bytes < triangles + answers + moved + 2**23
    assert pallas_calls(module) == {"gated_delta_blocks": 1, "gated_delta_prefill": 1}
    assert not find_copies(module, set(), {pool})
    report = "".join(capfd.readouterr())
    assert max(map(int, SPILT.findall(report))) == 0 and "serialized" not in report


def largest(kernel: GatedDelta, options: Options) -> Demand:
    """Return states with the most value heads, up to 64, that a kernel takes."""
    for r in range(LARGEST.r, 0, -1):
        demand = LARGEST._replace(r=r)
        try:
            kernel.check(options, demand)
        except KernelError:
            continue
        return demand
    raise AssertionError("the kernel takes no states")


def compiled_on(mesh: Mesh, function: Callable[..., Any], operands: Any, donated: int) -> Compiled:
    """Compile a function of whole operands, one of which is donated, for the devices of a mesh."""
    on_chip = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec())
        ),
        operands,
    )
    return jax.jit(on_chip, donate_argnums=donated).lower(*placed).compile()


def arguments(
    demand: Demand, rows: int, slots: int
) -> tuple[Tokens, jax.ShapeDtypeStruct, DeltaStates, Chunks]:
    """Return the abstract operands of a decode step in bfloat16."""
    k, r, d, v, t = demand
    sizes = {**demand._asdict(), "f": 2 * d + r * v, "t": t - 1, "s": slots}
    states = jax.tree.map(
        lambda letters: jax.ShapeDtypeStruct([sizes[x] for x in letters], jnp.float32), AXES
    )

    f = sizes["f"]
    rates = array(rows, k, r, dtype=jnp.float32)
    tokens = Tokens(array(rows, k, f, dtype=jnp.bfloat16), rates, rates)
    of_rows = array(rows)
    chunks = Chunks(of_rows, of_rows, of_rows, array(rows, dtype=jnp.bool_), of_rows, of_rows)
    return tokens, array(t, k, f, dtype=jnp.bfloat16), states, chunks


def prompts(
    demand: Demand, tokens: int, rows: int, slots: int
) -> tuple[Heads, jax.ShapeDtypeStruct, Chunks]:
    """Return the abstract operands of a kernel of prompts."""
    k, r, d, v, _ = demand
    float32 = partial(array, dtype=jnp.float32)
    vectors = float32(tokens, k, d)
    rates = float32(tokens, k, r)
    of_rows = array(rows)
    live = array(tokens, dtype=jnp.bool_)
    return (
        Heads(vectors, vectors, float32(tokens, k, r, v), rates, rates),
        float32(slots, k, r, d, v),
        Chunks(of_rows, of_rows, array(tokens), live, of_rows, of_rows),
    )


def array(*shape: int, dtype: type = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
