"""What the device drafts never changes what is said: any draft model, on any mesh, whatever the load and the number."""

import random
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import EngineConfig, EngineOptions
from jaxserve.engine.draft_model import DraftModel, ModelDrafter
from jaxserve.engine.plan import DRAFTED
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.speculation import DeviceDrafts, Speculation
from jaxserve.models.spec import ModelSpec
from jaxserve.request import Request
from sharding.mesh import MeshSpec
from tests.jaxserve.engine.test_speculation import Answers, check, requests
from tests.jaxserve.engine.tiny import BASE, EXPERTS, LATENT, SPEC, WINDOWED, NewDrafter, make_engine, make_params, run

MOST = 3
DRAFTING = replace(BASE, max_batch=4, step_tokens=16, speculate="draft", draft_tokens=MOST)
OTHER = replace(SPEC, num_layers=1, d_model=16, d_mlp=24, vocab_size=16, windows=(5,))  # knows fewer tokens, sees less


class Moody(Speculation):
    """Another number of drafts in every step, for another half of the sequences; now and then none at all."""

    def __init__(self, most: int = MOST, always: bool = False):
        super().__init__(DeviceDrafts(most, has_pages=True), most)
        self._draw, self._always = random.Random(5), always

    def draft(self, seqs: Iterable[Sequence], rows: int, plain: int) -> dict[int, list[int]]:
        if self._always:
            return {seq.id: [DRAFTED] * self.most for seq in seqs}
        count = self._draw.randrange(self.most + 1)
        return {seq.id: [DRAFTED] * count for seq in seqs if count and self._draw.random() < 0.7}


def drafter_of(spec: ModelSpec, seed: int) -> NewDrafter:
    def new(config: EngineConfig, mesh: jax.sharding.Mesh) -> ModelDrafter:
        held = spec.on(mesh.shape["tensor"])
        return ModelDrafter(DraftModel(held, make_params(mesh, spec=held, seed=seed)), config, mesh)

    return new


def answers(
    options: EngineOptions,
    asked: list[Request],
    mesh: MeshSpec | None = None,
    spec: ModelSpec = SPEC,
    drafter: NewDrafter | None = None,
    speculation: Speculation | None = None,
) -> Answers:
    engine, runner = make_engine(options, mesh, spec=spec, speculation=speculation, new_drafter=drafter)
    widest = {(b.kind, b.steps): b for b in sorted(runner.buckets.buckets) if b.kind != "score"}
    began = time.perf_counter()
    runner.warm_up(widest.values())
    print("compiled", time.perf_counter() - began, list(map(str, widest.values())))
    found = run(engine, [(2 * i, request) for i, request in enumerate(asked)])
    assert runner.compiles_after_ready == 0
    engine.close()
    return found


@pytest.fixture(scope="module")
def plain() -> Answers:
    return answers(replace(BASE, max_batch=1), requests(16))


@pytest.mark.parametrize(("spec", "seed"), [(SPEC, 1), (OTHER, 7)], ids=["itself", "another"])
def test_same_tokens(spec: ModelSpec, seed: int, plain: Answers) -> None:
    speculation = Moody()
    found = answers(DRAFTING, requests(16), drafter=drafter_of(spec, seed), speculation=speculation)
    check(found, plain)
    print(speculation.accepted, speculation.drafted)
