"""The planner against truth, on this machine's CPU: what it says of memory and time, and what an
engine takes there.
"""

import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from benchmarks.steps import Steps
from jaxserve.config import EngineOptions
from jaxserve.engine.build import build_engine
from jaxserve.models.decoder import param_specs
from jaxserve.models.layer_kind import windowed
from jaxserve.models.rope import Rope
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.compile import compile_steps
from jaxserve.plan.deployment import Deployment, Target, deploy
from jaxserve.plan.estimate import Estimate
from jaxserve.plan.roofline import Case, work_of
from jaxserve.plan.topology import Limits, parse
from jaxserve.sharding.mesh import MeshSpec
from tests.random_weights import random_weights

F32 = jnp.dtype("float32")
SPEC = ModelSpec("llama", 4096, 256, 3, 8, 4, 32, 512, 1e-5, 512, Rope(10000.0))
WINDOWED = replace(SPEC, num_kv_heads=8, layers=windowed([64, None, 64]))
OPTIONS = EngineOptions(max_batch=8, step_tokens=64, page_size=16, cache_tokens=4096)
# More than a cache of a CPU holds, so that a step reads its weights from memory: 230 MB.
HEAVY = ModelSpec("llama", 4096, 1024, 3, 16, 8, 64, 4864, 1e-5, 1024, Rope(10000.0))


def taken(tree: object) -> int:
    """Bytes of the first device's memory that arrays take: a shard that is looked at is another
    array of the same.
    """
    first = jax.devices()[0]
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    there = [shard.data for shard in shards if shard.device == first]
    return sum({data.unsafe_buffer_pointer(): data.nbytes for data in there}.values())


def deployed(spec: ModelSpec, axes: MeshSpec) -> Deployment:
    return deploy(Target("random", spec, parse(f"cpux{axes.size}"), OPTIONS), axes, F32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "axes"),
    [
        (SPEC, MeshSpec()),
        (SPEC, MeshSpec(tensor=4)),
        (SPEC, MeshSpec(tensor=8)),  # every kv head on two devices
        (WINDOWED, MeshSpec(data=2, tensor=2)),
    ],
    ids=["1", "4", "8 of 4 kv heads", "2x2 with windows"],
)
def test_memory_is_as_predicted(spec: ModelSpec, axes: MeshSpec) -> None:
    """Within 5 %: weights, state, and for every kind of step its arguments and temporaries."""
    plan = deployed(spec, axes)
    estimate = Estimate(
        plan, 256, None, steps=compile_steps(plan, plan.largest(), lambda done, total, what: None)
    )
    mesh = axes.build(jax.devices())
    held = spec.on(axes.tensor)
    before = taken(jax.live_arrays())
    params = random_weights(param_specs(held, F32), mesh)
    engine, runner = build_engine(held, params, mesh, OPTIONS, "truth")
    assert runner.config == plan.config and runner.buckets.buckets == plan.buckets
    assert taken(params) == pytest.approx(estimate.budget.weights, rel=0.05)
    assert taken(runner._state.current.rows) == pytest.approx(estimate.budget.rows, rel=0.05)
    assert taken(runner._state.current.kept) == pytest.approx(estimate.cache, rel=0.05)
    whole = estimate.budget.weights + estimate.budget.rows + estimate.cache
    assert taken(jax.live_arrays()) - before == pytest.approx(whole, rel=0.05)
    runner.warm_up(plan.largest())
    measured = {
        str(bucket): step.memory_analysis() for bucket, step in runner.executables.steps.items()
    }
    engine.close()
    for name, memory in measured.items():
        found = estimate.steps[name].found
        assert memory.argument_size_in_bytes == pytest.approx(found.arguments, rel=0.05), name
        assert memory.temp_size_in_bytes == pytest.approx(found.temporaries, rel=0.05), name
        assert memory.argument_size_in_bytes == pytest.approx(whole, rel=0.05), name
    assert estimate.budget.temporaries == pytest.approx(
        max(m.temp_size_in_bytes for m in measured.values()), rel=0.05
    )


@pytest.mark.parametrize("axes", [MeshSpec(), MeshSpec(tensor=2)], ids=["1", "2"])
@pytest.mark.parametrize(("kv", "token"), [("bfloat16", 2 * 32), ("int8", 32 + 4), ("fp8", 32 + 4)])
def test_pages_take_what_is_predicted(kv: str, token: int, axes: MeshSpec) -> None:
    """To the byte. token: bytes of a key or a value of one head, with its scale."""
    options = replace(OPTIONS, kv=kv)
    plan = deploy(Target("random", SPEC, parse(f"cpux{axes.size}"), options), axes, F32)
    mesh = axes.build(jax.devices())
    engine, runner = build_engine(
        SPEC, random_weights(param_specs(SPEC, F32), mesh), mesh, options, "truth"
    )
    assert runner.config == plan.config
    pages = taken(runner._state.current.kept)
    engine.close()
    assert pages == Estimate(plan, 256, None).cache == 4096 * 3 * 2 * 4 // axes.tensor * token


def test_what_is_counted_without_a_compiler() -> None:
    """Temporaries no less than it needs; what a decode step sends, to the byte."""
    plan = deployed(SPEC, MeshSpec(tensor=2))
    steps = compile_steps(plan, plan.largest(), lambda done, total, what: None)
    compiled = Estimate(plan, 256, None, steps=steps)
    counted = Estimate(plan, 256, None)
    decode = max(b for b in plan.buckets if b.kind == "decode")
    assert sum(steps[str(decode)].found.sent.values()) == plan.sent(compiled.case(decode))
    assert compiled.budget.temporaries <= counted.budget.temporaries < 2**30


class Calls:
    """Calls with the weights of a model, and steps of it, each timed by its fastest call.

    Other programs on the machine slow single calls; in many turns each call meets a quiet moment.
    """

    def __init__(self, spec: ModelSpec, case: Case):
        params = random_weights(param_specs(spec, F32), MeshSpec().build(jax.devices()))
        matrices = [
            leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(params) if leaf.ndim > 1
        ]
        longest = max(map(len, matrices))
        self.size = sum(leaf.size for leaf in matrices)
        products = jax.jit(
            lambda rows: [jnp.dot(rows[:, : len(m)], m, precision="highest") for m in matrices]
        )
        one, all_rows, square = (
            jnp.ones(shape) for shape in ((1, longest), (case.tokens, longest), (1024, 1024))
        )
        self.case = case
        self.steps = Steps(spec, params, case, launches=4)
        self.calls = {
            "step": self.steps.launch,
            "read": lambda: products(one),
            "multiply": lambda: products(all_rows),
            "square": lambda: jnp.dot(square, square, precision="highest"),
        }
        self.seconds = dict.fromkeys(self.calls, float("inf"))

    def turn(self) -> None:
        self.steps.rewind()
        for name, call in self.calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            self.seconds[name] = min(self.seconds[name], time.perf_counter() - began)

    @property
    def limits(self) -> Limits:
        flops = (
            2 * self.case.tokens * self.size / self.seconds["multiply"],
            2 * 1024**3 / self.seconds["square"],
        )
        return Limits(4 * self.size / self.seconds["read"], max(flops))


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("decode", 1, 64, 1),
        Case("decode", 8, 512, 8),
        Case("prefill", 1, 0, 128),
        Case("prefill", 8, 0, 512),
    ],
    ids=lambda case: f"{case.kind} of {case.tokens}",
)
def test_a_floor_is_never_above_the_measured_time(case: Case) -> None:
    calls = Calls(HEAVY, case)
    work = work_of(HEAVY, F32, case)
    for turn in range(100):
        calls.turn()
        if turn >= 11 and work.floor(calls.limits) <= calls.seconds["step"]:
            break
    calls.steps.runner.release_state()
    floor = work.floor(calls.limits)
    assert 0.1 * calls.seconds["step"] < floor <= calls.seconds["step"], (floor, calls.seconds)
