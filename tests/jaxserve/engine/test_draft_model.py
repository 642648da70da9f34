"""Drafts of the device never change the output, with any draft model, mesh, load and number."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.config import EngineConfig, EngineOptions
from jaxserve.engine.device.draft_model import DraftModel, ModelDrafter
from jaxserve.engine.device.drafting import ModelPass
from jaxserve.engine.device.lane_index import put, take
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.device.sharded_model import ShardedModel
from jaxserve.engine.device.state import State
from jaxserve.engine.device.token_layout import TokenLayout
from jaxserve.engine.engine import Engine
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.host.speculation import DeviceDrafts, Speculation
from jaxserve.engine.plan import DRAFTED
from jaxserve.models.decoder import param_specs
from jaxserve.models.layer_kind import windowed
from jaxserve.models.quant import parse_scheme
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels import dispatch
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.sharding.rules import DP_AXES
from tests.jaxserve.engine.test_speculation import Answers, check, requests
from tests.jaxserve.engine.tiny import (
    BASE,
    EXPERTS,
    LATENT,
    SPEC,
    WINDOWED,
    NewDrafter,
    make_engine,
    make_params,
    run,
)
from tests.random_weights import random_weights

MOST = 3
COUNT = 16  # requests
DRAFTING = replace(BASE, step_tokens=16, speculate="draft", draft_tokens=MOST)
# A model with fewer tokens and a short window.
OTHER = replace(SPEC, num_layers=1, d_model=16, d_mlp=24, vocab_size=16, layers=windowed([5]))


class VaryingSpeculation(Speculation):
    """Speculation with another number of drafts, for other sequences, in every step."""

    def __init__(self, has_pages: bool = True, always: bool = False):
        super().__init__(DeviceDrafts(MOST, has_pages), MOST)
        self._draw = random.Random(5)
        self._always = always

    def draft(
        self, seqs: Iterable[Sequence], rows: int, plain: int, limit: int
    ) -> dict[int, list[int]]:
        if self._always:
            return {seq.id: [DRAFTED] * MOST for seq in seqs}
        count = self._draw.randrange(MOST + 1)
        return {seq.id: [DRAFTED] * count for seq in seqs if count and self._draw.random() < 0.7}


def drafter_factory(spec: ModelSpec, seed: int) -> NewDrafter:
    def new(config: EngineConfig, mesh: jax.sharding.Mesh) -> ModelDrafter:
        held = spec.on(mesh.shape["tensor"])
        return ModelDrafter(DraftModel(held, make_params(mesh, spec=held, seed=seed)), config, mesh)

    return new


def warm_up(runner: DeviceRunner) -> None:
    """Compile the widest step of each kind; narrower ones would take time for nothing."""
    widest = {(b.kind, b.steps): b for b in sorted(runner.buckets.buckets) if b.kind != "score"}
    runner.warm_up(widest.values())


def warm_engine(
    options: EngineOptions,
    mesh: MeshSpec | None = None,
    spec: ModelSpec = SPEC,
    drafter: NewDrafter | None = None,
    speculation: Speculation | None = None,
) -> tuple[Engine, DeviceRunner]:
    engine, runner = make_engine(
        options, mesh, spec=spec, speculation=speculation, new_drafter=drafter
    )
    warm_up(runner)
    return engine, runner


def answers(options: EngineOptions, spacing: int = 2, **engine_arguments: Any) -> Answers:
    """Answer COUNT requests. spacing: steps between two arrivals."""
    engine, runner = warm_engine(options, **engine_arguments)
    found = run(engine, [(spacing * i, request) for i, request in enumerate(requests(COUNT))])
    assert runner.compiles_after_ready == 0
    engine.close()
    return found


def plain_answers(spec: ModelSpec = SPEC) -> Answers:
    return answers(replace(BASE, max_batch=1, prefix_cache=False), spec=spec)


@pytest.fixture(scope="module")
def expected_answers() -> Answers:
    return plain_answers()


def test_drafts_of_the_model_itself_are_always_accepted(expected_answers: Answers) -> None:
    """The draft model samples with the same noise, penalties, bias, allowed tokens and minimum."""
    speculation = VaryingSpeculation(always=True)
    found = answers(DRAFTING, spacing=0, drafter=drafter_factory(SPEC, 1), speculation=speculation)
    check(found, expected_answers)
    assert speculation.drafted > 150
    ends = sum(o.last.finish.reason == "stop" for o in found.values() if o.last and o.last.finish)
    assert speculation.drafted - speculation.accepted <= MOST * ends, "but for drafts behind an end"


@pytest.mark.parametrize(
    ("spec", "seed"),
    [pytest.param(SPEC, 1, marks=pytest.mark.slow), (OTHER, 7)],
    ids=["itself", "another"],
)
def test_any_number_in_any_step(spec: ModelSpec, seed: int, expected_answers: Answers) -> None:
    speculation = VaryingSpeculation()
    check(
        answers(DRAFTING, drafter=drafter_factory(spec, seed), speculation=speculation),
        expected_answers,
    )
    assert speculation.drafted > 50
    assert seed == 1 or 0 < speculation.accepted < speculation.drafted / 2


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPEC, OTHER], ids=["itself", "another"])
@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        (replace(DRAFTING, step_tokens=12), MeshSpec()),
        (replace(DRAFTING, cache_tokens=80), MeshSpec()),
        (replace(DRAFTING, decode_steps=3), MeshSpec()),
        (replace(DRAFTING, kv="int8", page_size=4), MeshSpec()),
        (DRAFTING, MeshSpec(tensor=2)),
        (DRAFTING, MeshSpec(data=2, tensor=2)),
    ],
    ids=["chunks", "preempted", "several", "int8", "1x1x2", "2x1x2"],
)
def test_cut_preempted_and_sharded(
    options: EngineOptions, mesh: MeshSpec, spec: ModelSpec, expected_answers: Answers
) -> None:
    speculation = VaryingSpeculation()
    found = answers(options, mesh=mesh, drafter=drafter_factory(spec, 1), speculation=speculation)
    if options.kv == "auto":
        check(found, expected_answers)
    else:
        check(found, answers(replace(BASE, max_batch=1, prefix_cache=False, kv=options.kv)))
    assert speculation.drafted > 10
    preemptions = sum(o.last.times.preemptions for o in found.values() if o.last and o.last.times)
    assert (preemptions > 0) == (options.cache_tokens == 80)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "other"),
    [(WINDOWED, WINDOWED), (WINDOWED, SPEC), (EXPERTS, LATENT), (LATENT, EXPERTS)],
    ids=["windows-windows", "windows-full", "experts-latent", "latent-experts"],
)
def test_other_models(spec: ModelSpec, other: ModelSpec) -> None:
    speculation = VaryingSpeculation()
    check(
        answers(DRAFTING, spec=spec, drafter=drafter_factory(other, 1), speculation=speculation),
        plain_answers(spec),
    )
    assert speculation.drafted > 50 and (
        spec != other or speculation.accepted > speculation.drafted * 0.9
    )


def test_cached_prompts_are_caught_up_anew(expected_answers: Answers) -> None:
    """The second run finds every prompt in the cache, and as many drafts are accepted."""
    speculation = VaryingSpeculation(always=True)
    engine, _ = warm_engine(DRAFTING, drafter=drafter_factory(SPEC, 1), speculation=speculation)
    for again in range(2):
        asked = [replace(r, id=f"{again}-{r.id}") for r in requests(COUNT)]
        found = run(engine, [(0, r) for r in asked])
        assert {key: o.tokens for key, o in found.items()} == {
            (f"{again}-{id}", n): o.tokens for (id, n), o in expected_answers.items()
        }
    assert sum(o.last.times.cached for o in found.values() if o.last and o.last.times) > 100
    assert speculation.accepted > 0.9 * speculation.drafted
    engine.close()


# ---- heads on the model's hidden states


@dataclass(frozen=True)
class EchoDrafter:
    """Drafter that keeps the hidden state behind which each row's newest token was sampled.

    It drafts what the model's head says of that state: at temperature 0, the newest token again.
    """

    config: EngineConfig
    mesh: jax.sharding.Mesh
    params: Any = ()
    abstract_params: Any = ()

    @property
    def abstract_state(self) -> Any:
        split = NamedSharding(self.mesh, PartitionSpec(DP_AXES))
        shape = (self.config.lanes, self.config.max_batch, SPEC.d_model)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=split)

    def next(
        self, params: dict, state: State, ids: jax.Array, tokens: jax.Array, layout: TokenLayout
    ) -> tuple[Any, jax.Array]:
        model = ShardedModel(
            SPEC,
            self.mesh,
            dispatch.IMPLEMENTATIONS["reference"],
            dispatch.GROUPED["reference"],
            {},
            dispatch.RECURRENCES["reference"],
            4,
            jnp.float32,
        )
        return state.drafter, model.logits(
            params, take(state.drafter, ids).reshape(-1, SPEC.d_model)
        )

    def observe(self, params: dict, state: State, model: ModelPass) -> Any:
        ids = jnp.where(
            model.samples, model.ids, self.config.max_batch
        )  # out of range: nothing to keep
        return put(state.drafter, take(model.hidden, model.newest), ids)

    def catch_up(self, *_: Any) -> tuple[Any, jax.Array]:
        raise AssertionError("it learns of every token by reading")


@pytest.mark.parametrize(
    "mesh", [MeshSpec(), pytest.param(MeshSpec(data=2, tensor=2), marks=pytest.mark.slow)]
)
def test_a_head_reads_the_hidden_state_of_the_newest_token(mesh: MeshSpec) -> None:
    """After prefills, decodes and verifications, the kept state predicts the newest token."""
    engine, runner = make_engine(
        DRAFTING, mesh, speculation=VaryingSpeculation(has_pages=False), new_drafter=EchoDrafter
    )
    runner.warm_up(
        [
            max(b for b in runner.buckets.buckets if b.kind == kind)
            for kind in ("decode", "prefill", "verify")
        ]
    )
    head = np.asarray(runner._params["head"])
    norm = np.asarray(runner._params["norm"])
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    for i in range(6):
        engine.submit(Request(id=str(i), prompt=(i, 2 * i, 7, 3), params=params))
    said = {str(i): list[int]() for i in range(6)}
    checked = 0
    while engine.has_work:
        for event in engine.step():
            said[event.request_id] += event.tokens
        kept = np.asarray(runner._state.current.drafter)
        newest = np.asarray(runner._state.current.rows.token)
        for lane in engine.scheduler.lanes:
            for seq in lane.running:
                if seq.newest_on_device:
                    hidden = kept[lane.index, seq.row]
                    normed = hidden / np.sqrt((hidden**2).mean() + SPEC.norm_eps) * norm
                    assert (normed @ head).argmax() == newest[lane.index, seq.row]
                    checked += 1
    engine.close()
    assert checked > 60 and all(len(tokens) == 30 for tokens in said.values())
    repeats = sum(a == b for tokens in said.values() for a, b in pairwise(tokens))
    assert engine.scheduler.speculation and 0 < engine.scheduler.speculation.accepted <= repeats


def test_a_quantized_draft_model() -> None:
    """The model itself is not quantized: each has its own kernels and form."""

    def quantized_drafter(config: EngineConfig, mesh: jax.sharding.Mesh) -> ModelDrafter:
        params = random_weights(
            param_specs(SPEC, jnp.dtype(jnp.float32), parse_scheme("int8")), mesh
        )
        return ModelDrafter(DraftModel(SPEC, params), config, mesh)

    engine, runner = warm_engine(
        DRAFTING, drafter=quantized_drafter, speculation=VaryingSpeculation()
    )
    assert runner.lowering.scheme is None
    found = run(engine, [(0, requests(1)[0])])
    expected, _ = warm_engine(replace(BASE, max_batch=1))
    check(found, run(expected, [(0, requests(1)[0])]))
    engine.close()
    expected.close()


@pytest.mark.parametrize("kind", ["verify", "draft", "decode"])
def test_state_is_aliased_and_never_copied(kind: str) -> None:
    """Pages of the draft model are aliased too, through the scan that drafts."""
    options = replace(DRAFTING, page_size=16, cache_tokens=2**18)
    engine, runner = make_engine(
        options, speculation=VaryingSpeculation(), new_drafter=drafter_factory(SPEC, 1)
    )
    memory = (
        runner.lowering.step(max(b for b in runner.buckets.buckets if b.kind == kind))
        .compile()
        .memory_analysis()
    )
    state = runner.lowering.state
    assert memory.alias_size_in_bytes == nbytes(state)
    assert memory.temp_size_in_bytes < nbytes(state.kept[0]) / 10
    engine.close()


def nbytes(tree: object) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
