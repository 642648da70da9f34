"""Decode steps of the gated delta rule, as the compilers for TPUs and an H200 build them.

Pools of states are updated in place, and nothing of their size is allocated.

Run by `make deviceless`, in an environment that has these compilers; skipped in any other.
"""

import importlib.util
import re
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from _pytest.mark.structures import ParameterSet
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.pallas_kernels.dispatch import RECURRENCES
from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.pallas_kernels.gated_delta.api import (
    AXES,
    DeltaStates,
    Demand,
    GatedDelta,
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
    on_chip = jax.shard_map(
        partial(kernel.decode, options=options),
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
    compiled = jax.jit(on_chip, donate_argnums=2).lower(*placed).compile()
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


def arguments(
    demand: Demand, rows: int, slots: int
) -> tuple[Tokens, jax.ShapeDtypeStruct, DeltaStates, Chunks]:
    """Return the abstract operands of a decode step in bfloat16."""
    k, r, d, v, t = demand
    sizes = {**demand._asdict(), "f": 2 * d + r * v, "t": t - 1, "s": slots}
    states = jax.tree.map(
        lambda letters: jax.ShapeDtypeStruct([sizes[x] for x in letters], jnp.float32), AXES
    )

    def array(*shape: int, dtype: type = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    f = sizes["f"]
    rates = array(rows, k, r, dtype=jnp.float32)
    tokens = Tokens(array(rows, k, f, dtype=jnp.bfloat16), rates, rates)
    of_rows = array(rows)
    chunks = Chunks(of_rows, of_rows, of_rows, array(rows, dtype=jnp.bool_), of_rows, of_rows)
    return tokens, array(t, k, f, dtype=jnp.bfloat16), states, chunks
