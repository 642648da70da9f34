"""Engines with quantized weights give the tokens of one device, on any mesh.

Prompts are chunked, shared and preempted.
"""

from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import jax
import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet

from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.config import EngineOptions
from jaxserve.engine.build import plan_config
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.loading.spec import read_spec
from jaxserve.models.quant import SCHEMES
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine.tiny import Outcome, run
from tests.jaxserve.loading.loaded import load_params

GOLDEN = Path(__file__).parents[2] / "golden"
BOUND = 1e-4  # of log-probabilities, on any mesh
MESHES = ((1, 1, 2), (1, 1, 4), (2, 1, 4), (1, 4, 2), (1, 8, 1))  # data, expert, tensor
WHOLE = EngineOptions(
    max_batch=1, step_tokens=64, page_size=4, cache_tokens=256, max_context=60, prefix_cache=False
)
# Chunks of 16 tokens; pages for less than the two sequences that a lane has at a time.
CUT = EngineOptions(max_batch=2, step_tokens=16, page_size=4, cache_tokens=60, max_context=60)
# Not w8a8: activations that differ by a hair may be rounded to numbers that differ by a step.
PER_CHANNEL = [
    scheme for scheme, kept in SCHEMES.items() if kept.group is None and not kept.activations
]


def answers(case: str, weights: str, options: EngineOptions, mesh_spec: MeshSpec) -> list[Outcome]:
    """Answer each of the case's two prompts twice for every lane, in turns."""
    mesh = mesh_spec.build(jax.devices())
    checkpoint = HFCheckpoint.open(GOLDEN / case)
    spec = read_spec(checkpoint.config)[1].on(mesh_spec.tensor)
    params = load_params(checkpoint, mesh, "float32", weights=weights)
    config = plan_config(spec, params, mesh, options)
    runner = DeviceRunner(spec, params, config, mesh)
    engine = Engine(Scheduler(config, fingerprint=case), runner)
    runner.warm_up(
        [max(b for b in runner.buckets.buckets if b.kind == kind) for kind in ("decode", "prefill")]
    )
    prompts = np.load(GOLDEN / case / "golden.npz")["prompts"].tolist()
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=20)
    asked = [
        Request(id=str(i), prompt=tuple(prompts[i % 2]), params=sampling)
        for i in range(4 * mesh_spec.lanes)
    ]
    found = run(engine, [(0, request) for request in asked])
    engine.close()
    return [found[request.id, 0] for request in asked]


@cache
def answers_on_one_device(case: str, weights: str) -> list[Outcome]:
    return answers(case, weights, WHOLE, MeshSpec())


def cases() -> Iterator[ParameterSet]:
    """Yield all cases; `make test` runs one mesh of int4."""
    for weights, mesh in product(PER_CHANNEL, MESHES):
        marks = (
            [] if (weights, mesh) == ("int4", (1, 1, 2)) else [pytest.mark.slow, pytest.mark.matrix]
        )
        yield pytest.param(weights, mesh, marks=marks, id=f"{weights}-{'x'.join(map(str, mesh))}")


@pytest.mark.parametrize(("weights", "mesh"), list(cases()))
def test_the_same_on_every_mesh(weights: str, mesh: tuple[int, int, int]) -> None:
    found = answers("llama_gqa", weights, CUT, MeshSpec(*mesh))
    expected = answers_on_one_device("llama_gqa", weights)
    for i, outcome in enumerate(found):
        check_equal_outcomes(outcome, expected[i % 2])
    times = [outcome.last.times for outcome in found if outcome.last]
    assert sum(t.cached for t in times) > 0 and sum(t.preemptions for t in times) > 0


def check_equal_outcomes(one: Outcome, other: Outcome) -> None:
    """Check for equal tokens and log-probabilities, up to a choice by less than the bound."""
    compared = 0
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
        scores = dict(mine.top)
        expected = dict(theirs.top)
        both = scores.keys() & expected.keys()
        np.testing.assert_allclose(
            [scores[i] for i in both], [expected[i] for i in both], atol=BOUND
        )
        compared += 1
        if mine.token != theirs.token:
            assert abs(expected[mine.token] - expected[theirs.token]) < 2 * BOUND
            break
    assert compared > 8
