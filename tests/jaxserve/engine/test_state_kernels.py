"""Engines whose steps advance states by interpreted kernels: the tokens of XLA's."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from jaxserve.config import EngineOptions
from jaxserve.models.layer_kind import DeltaState, LayerKind
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels import dispatch
from jaxserve.request import Request
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine.interpreters import interpreting
from tests.jaxserve.engine.test_states import (
    ALONE,
    CROWDED,
    Answers,
    KnownProposer,
    answers,
    requests,
    wrong,
)
from tests.jaxserve.engine.tiny import STATES
from tests.pallas_kernels.hopper_kernels import on_gpu
from tests.slow_cases import slow_but

MODES = {
    "tpu": partial(pltpu.force_tpu_interpret_mode, pltpu.InterpretParams()),
    "gpu": partial(plgpu.force_gpu_interpret_mode, plgpu.InterpretGPUParams()),
}
STATE = DeltaState(key_heads=2, value_heads=4, key_dim=128, value_dim=128, taps=4)
WIDE = replace(STATES, layers=(LayerKind(state=STATE), LayerKind(), LayerKind(state=STATE)))
NARROW = replace(STATES, num_layers=2, layers=(LayerKind(state=STATE), LayerKind()))
# A state takes as much memory as the pages of 4,144 tokens.
SOME_SNAPSHOTS = replace(CROWDED, cache_tokens=50_000)
ASKED = [list(requests())[:9]]

pytestmark = pytest.mark.kernels


@cache
def alone(spec: ModelSpec = WIDE) -> Answers:
    return answers(ALONE, asked=ASKED, spec=spec)[0]


@pytest.fixture(params=slow_but(list(MODES), ["tpu"]))
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Interpret a kernel on a CPU, where no platform list offers it; on a GPU its own runs."""
    alone(request.node.callspec.params.get("spec", WIDE))
    if on_gpu():
        if request.param != "gpu":
            pytest.skip("its interpreter is for a CPU")
        yield request.param
        return
    monkeypatch.setattr(dispatch, "PLATFORMS", {})
    with interpreting(monkeypatch, MODES[request.param]):
        yield request.param


def answered(
    kernel: str,
    asked: list[list[Request]],
    options: EngineOptions = SOME_SNAPSHOTS,
    spec: ModelSpec = WIDE,
    **more: Any,
) -> Answers:
    """Answer requests; the steps have to have the kernels."""
    options = replace(options, recurrence=kernel)
    implementation = dispatch.RECURRENCES[kernel]
    with (
        patch.object(implementation, "decode", wraps=implementation.decode) as decode,
        patch.object(implementation, "prefill", wraps=implementation.prefill) as prefill,
    ):
        found = answers(options, asked=asked, spec=spec, interpreted=True, **more)[0]
    assert decode.called and prefill.called
    return found


@pytest.mark.parametrize(
    ("spec", "count"),
    [(NARROW, 5), pytest.param(WIDE, 9, marks=pytest.mark.slow)],
    ids=["one state", "two states"],
)
def test_requests_answer_as_each_alone(kernel: str, spec: ModelSpec, count: int) -> None:
    """Rows come and go, and leave states behind for the prefix cache."""
    if kernel == "gpu" and not on_gpu():
        pytest.skip("the GPU's interpreter takes too long: see the test of few tokens")
    found = answered(kernel, [ASKED[0][:count]], spec=spec)
    assert wrong(found, alone(spec)) == []
    times = [each.last.times for each in found.values() if each.last and each.last.times]
    assert sum(each.cached > 0 for each in times) > 0


@pytest.mark.slow
def test_few_tokens_of_one_layer(kernel: str) -> None:
    """Two prompts side by side, in chunks, and decode steps."""
    asked = [[shortened(request) for request in ASKED[0][1:3]]]
    right = answers(ALONE, asked=asked, spec=NARROW)[0]
    options = replace(ALONE, max_batch=2, step_tokens=16)
    assert wrong(answered(kernel, asked, options, NARROW), right) == []


def shortened(request: Request) -> Request:
    return replace(request, params=replace(request.params, max_tokens=2))


@pytest.mark.slow
def test_heads_over_two_devices(kernel: str) -> None:
    if kernel == "gpu":
        pytest.skip("the GPU's interpreter has memory for one device")
    found = answered(kernel, [ASKED[0][:4]], mesh=MeshSpec(tensor=2))
    assert wrong(found, alone()) == []


@pytest.mark.slow
def test_steps_beside_verifications(kernel: str) -> None:
    """Steps that verify drafts are XLA's, and rows without drafts are the kernel's."""
    found = answered(kernel, [ASKED[0][:6]], proposer=KnownProposer(alone()))
    assert wrong(found, alone()) == []
