"""Engines with the interpreted TPU attention kernel, against the loop without cache.

Every kind of page group that a model has is tried, and heads split over two devices.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels import dispatch
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine import naive
from tests.jaxserve.engine.interpreters import interpreting
from tests.jaxserve.engine.test_engine_oracle import check, requests_for_interpreters
from tests.jaxserve.engine.tiny import (
    BASE,
    SPEC,
    WINDOWED,
    largest_of_each_kind,
    make_engine,
    make_params,
    run,
)

OPTIONS = replace(BASE, page_size=8, attention="tpu")


@pytest.fixture(autouse=True)
def interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpret the kernel on a CPU, where no platform list offers it.

    The interpreter compiles while it runs, so compiles are not checked here.
    """
    monkeypatch.setattr(dispatch, "PLATFORMS", {})
    with interpreting(
        monkeypatch, partial(pltpu.force_tpu_interpret_mode, pltpu.InterpretParams())
    ):
        yield


@pytest.mark.kernels
@pytest.mark.parametrize(
    "spec, mesh",
    [
        pytest.param(SPEC, MeshSpec(), marks=pytest.mark.slow),
        (WINDOWED, MeshSpec()),
        pytest.param(SPEC, MeshSpec(tensor=2), marks=pytest.mark.slow),
    ],
    ids=["full", "window and full", "tensor = 2"],
)
def test_tokens_and_logits(spec: ModelSpec, mesh: MeshSpec) -> None:
    engine, runner = make_engine(OPTIONS, mesh, spec)
    runner.warm_up(largest_of_each_kind(runner))
    arrivals = requests_for_interpreters()
    outcomes = run(engine, arrivals)
    weights = naive.to_numpy(make_params(MeshSpec().build(jax.devices()), spec=spec))
    for _, request in arrivals:
        p = request.params
        for i in range(p.n):
            answer = naive.generate(weights, spec, request, p.seed or 0, i, p.max_tokens or 0)
            check(outcomes[request.id, i], answer, request, i)
    engine.close()
