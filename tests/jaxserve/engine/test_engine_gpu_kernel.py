"""Engines with the Hopper kernels, against the loop without cache.

The kernels are interpreted, or run on a GPU. Every kind of page group that a model has is tried.
The loop has the same rounded weights in float32, so results agree within bfloat16's rounding.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.models.layer_kind import windowed
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels import dispatch
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine import naive
from tests.jaxserve.engine.interpreters import interpreting
from tests.jaxserve.engine.test_engine_oracle import check, requests_for_interpreters
from tests.jaxserve.engine.tiny import (
    BASE,
    SPEC,
    largest_of_each_kind,
    make_engine,
    make_params,
    run,
)
from tests.pallas_kernels.hopper_kernels import on_gpu

BOUND = 0.15  # logits reach 10, and gaps between the best two are about one
OPTIONS = replace(BASE, page_size=64, attention="gpu")
FULL = replace(SPEC, head_dim=64)
WINDOWED = replace(FULL, layers=windowed([7, None]), attn_softcap=3.0)


@pytest.fixture(autouse=True)
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpret the kernel on a CPU, where no platform list offers it; on a GPU it runs."""
    if on_gpu():
        yield
        return
    monkeypatch.setattr(dispatch, "PLATFORMS", {})
    with interpreting(
        monkeypatch, partial(plgpu.force_gpu_interpret_mode, plgpu.InterpretGPUParams())
    ):
        yield


@pytest.mark.kernels
@pytest.mark.parametrize(
    "spec", [pytest.param(FULL, marks=pytest.mark.slow), WINDOWED], ids=["full", "window and full"]
)
def test_tokens_and_logits(spec: ModelSpec) -> None:
    dtype = jnp.dtype(jnp.bfloat16)
    engine, runner = make_engine(OPTIONS, spec=spec, dtype=dtype)
    runner.warm_up(largest_of_each_kind(runner))
    arrivals = requests_for_interpreters()
    outcomes = run(engine, arrivals)
    weights = naive.to_numpy(make_params(MeshSpec().build(jax.devices()), dtype, spec))
    for _, request in arrivals:
        p = request.params
        for i in range(p.n):
            answer = naive.generate(weights, spec, request, p.seed or 0, i, p.max_tokens or 0)
            check(outcomes[request.id, i], answer, request, i, BOUND)
    engine.close()
