"""Tests of the inspection of compiled steps: copies are found, and nothing else is called one."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.memory import bytes_per_device
from jaxserve.plan.hlo import inspection
from jaxserve.plan.hlo.inspection import Inspection, inspect
from jaxserve.plan.hlo.parser import parse
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine.tiny import BASE, SPEC, make_engine

# Shapes, of more than a mebibyte each.
WEIGHT = (640, 512)
PAGES = (1031, 2, 16, 64)


def inspected(step: Callable) -> Inspection:
    """Compile and inspect step(weight, pages, x), with the pages donated."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    weight, pages, x = (
        jax.ShapeDtypeStruct(s, np.float32, sharding=one) for s in (WEIGHT, PAGES, (3, WEIGHT[0]))
    )
    compiled = jax.jit(step, donate_argnums=1).lower(weight, pages, x).compile()
    state = SimpleNamespace(kept=pages, drafter=None)
    lowering = SimpleNamespace(params={"w": weight}, state=state, mesh=SimpleNamespace(size=1))
    return inspect(compiled, lowering)  # type: ignore[arg-type]


def test_a_product_and_a_write_in_place_are_no_copies() -> None:
    found = inspected(lambda w, pages, x: (x @ w, pages.at[7].set(x[0, 0])))
    assert found.copies == () and found.aliased == 4 * np.prod(PAGES) and found.unaliased < 2**16


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda w, pages, x: (jnp.sort(w.T, axis=0), pages), id="a weight turned over"),
        pytest.param(
            lambda w, pages, x: (x, jnp.where(x[0, 0] > 0, pages, 1.0)[::-1]), id="pages selected"
        ),
        pytest.param(
            lambda w, pages, x: (jnp.sort(pages.swapaxes(1, 2), axis=0), pages),
            id="pages turned over",
        ),
    ],
)
def test_copies_are_found(step: Callable) -> None:
    assert inspected(step).copies


def test_a_step_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "LARGE", 4096)
    # Two kv heads on each device: XLA:CPU copies pages of a lone one.
    spec = replace(SPEC, num_kv_heads=4)
    engine, runner = make_engine(replace(BASE, cache_tokens=4 * 1031), MeshSpec(tensor=2), spec)
    found = inspect(runner.lowering.step(Bucket("decode", 4, 4)).compile(), runner.lowering)
    engine.close()
    assert found.aliased == bytes_per_device(runner.lowering.state)
    assert found.copies == () and found.kernels > 0
    assert found.collectives["all-reduce"] >= 2 * runner.spec.num_layers


# Text as compilers for GPUs and TPUs write it: asynchronous pairs with nested types, fusions in
# fusions, reducers.
MODULE = """
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %s = f32[] add(%a, %a)
}

%inner (p: bf16[64,8]) -> bf16[64,8] {
  %p = bf16[64,8]{1,0} parameter(0)
  ROOT %scatter.1 = bf16[64,8]{1,0:T(8,128)(2,1)} scatter(%p, %p, %p), to_apply=%sum
}

%written (p: bf16[64,8]) -> (bf16[64,8], f32[4]) {
  %p = bf16[64,8]{1,0} parameter(0)
  %x = f32[4]{0} constant({...})
  %w = bf16[64,8]{1,0} fusion(%p), kind=kCustom, calls=%inner
  ROOT %t = (bf16[64,8]{1,0}, f32[4]{0}) tuple(%w, %x)
}

ENTRY %main (w: bf16[32,4], pages: bf16[64,8]) -> (bf16[64,8], f32[4]) {
  %w = bf16[32,4]{1,0} parameter(0)
  %pages = bf16[64,8]{1,0} parameter(1)
  %all-reduce-start = ((f32[2]{0}, f32[2]{0}), (f32[2]{0}, f32[2]{0})) all-reduce-start(%w, %w), to_apply=%sum
  %all-reduce-done = (f32[2]{0}, f32[2]{0}) all-reduce-done(%all-reduce-start)
  %good = (bf16[64,8]{1,0}, f32[4]{0}) fusion(%pages), kind=kLoop, calls=%written
  %reads = ((bf16[64,8]{1,0}, s32[]), f32[4]{0}, u32[]) fusion-start(%pages, %w), kind=kLoop, calls=%sum
  %near = (bf16[4,32]{1,0:T(8,128)S(1)}, bf16[4,32]{1,0}, u32[]) copy-start(%w)
  BAD
  ROOT %end = (bf16[64,8]{1,0}, f32[4]{0}) tuple(%pages, %w)
}
"""
BESIDE = """
%beside (p: bf16[64,8]) -> (bf16[64,8], bf16[64,8]) {
  %p = bf16[64,8]{1,0} parameter(0)
  %w = bf16[64,8]{1,0} dynamic-update-slice(%p, %p, %p)
  %r = bf16[64,8]{1,0} reverse(%w), dimensions={0}
  ROOT %t = (bf16[64,8]{1,0}, bf16[64,8]{1,0}) tuple(%w, %r)
}
"""
TURNED = """
%turned (p: bf16[32,4]) -> bf16[4,32] {
  %p = bf16[32,4]{1,0} parameter(0)
  ROOT %tr = bf16[4,32]{1,0} transpose(%p), dimensions={1,0}
}
"""
BAD = {
    "a pool beside one": "%bad = (bf16[64,8]{1,0}, bf16[64,8]{1,0}) fusion(%pages), kind=kLoop, "
    "calls=%beside",
    "a selected pool": "%bad = bf16[64,8]{1,0} select(%w, %pages, %pages)",
    "a turned weight": "%bad = ((bf16[32,4]), bf16[4,32], u32[]) fusion-start(%w), kind=kLoop, "
    "calls=%turned",
    "a gathered weight": "%bad = (bf16[16,4]{1,0}, bf16[32,4]{1,0}) all-gather-start(%w), "
    "dimensions={0}",
    "a converted weight": "%bad = f32[32,4]{1,0} convert(%w)",
    "a weight in other tiles": "%bad = bf16[32,4]{1,0:T(16,128)(2,1)} copy(%w)",
}


def test_moves_that_are_no_copies() -> None:
    module = parse(MODULE.replace("BAD", ""))
    assert inspection.find_copies(module, {128}, {512}) == []
    starts = [i for i in module["main"].values() if i.op == "all-reduce" and not i.done]
    assert len(starts) == 1


@pytest.mark.parametrize("line", BAD.values(), ids=list(BAD))
def test_each_kind_of_copy_is_found(line: str) -> None:
    module = parse(
        (BESIDE * ("beside" in line) + TURNED * ("turned" in line) + MODULE).replace("BAD", line)
    )
    assert inspection.find_copies(module, {128}, {512}) == ["bad"]
