"""Launches without sequences, which come before a step's first use, leave the state as it is."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.host.prompt_lookup import PromptLookup
from jaxserve.engine.host.speculation import Speculation
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine.test_draft_model import drafter_factory
from tests.jaxserve.engine.tiny import BASE, EXPERTS, LATENT, SPEC, WINDOWED, make_engine
from tests.slow_cases import slow_but

SMALL = replace(BASE, max_batch=2, step_tokens=16, cache_tokens=128)
DRAFTS = 3
KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "full attention": lambda: {"spec": SPEC},
    "windows": lambda: {"spec": WINDOWED},
    "experts": lambda: {"spec": EXPERTS},
    "latent": lambda: {"spec": LATENT},
    "lanes": lambda: {"spec": EXPERTS, "mesh_spec": MeshSpec(data=2)},
    "8 bits": lambda: {"options": replace(SMALL, kv="int8")},
    "several decodes": lambda: {"options": replace(SMALL, decode_steps=3)},
    "prompt lookup": lambda: {
        "options": replace(SMALL, speculate="ngram", draft_tokens=DRAFTS),
        "speculation": Speculation(PromptLookup(DRAFTS), DRAFTS),
    },
    "draft model": lambda: {
        "options": replace(SMALL, speculate="draft", draft_tokens=DRAFTS),
        "new_drafter": drafter_factory(SPEC, 2),
    },
    "embeddings": lambda: {"spec": replace(SPEC, embeds=True)},
}
# Together they have every kind of step.
QUICK = ["lanes", "several decodes", "draft model", "embeddings"]


def request(i: int, embed: bool = False) -> Request:
    params = SamplingParams(
        max_tokens=20,
        seed=i,
        ignore_eos=True,
        presence_penalty=0.0 if embed else 0.5,
        logit_bias={} if embed else {3: 1.0},
    )
    prompt = tuple((7 * i + 3 * j) % SPEC.vocab_size for j in range(11 + i))
    return Request(id=str(i), prompt=prompt, params=params)


def bits(runner: DeviceRunner) -> list[bytes]:
    """Return the bits of every array of the state, pages of no sequence included."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(runner._state.current)]


@pytest.mark.parametrize("kind", slow_but(list(KINDS), QUICK))
def test_an_empty_launch_changes_no_bit_of_the_state(kind: str) -> None:
    engine, runner = make_engine(**{"options": SMALL} | KINDS[kind]())
    runner.warm_up(runner.buckets.buckets)
    for i in range(3):
        engine.submit(request(i, runner.config.embeds))
    for _ in range(5):  # prompts in pages, rows in use, and one sequence that waits
        engine.step()
    before = bits(runner)
    assert any(any(array) for array in before)
    runner.empty_launches = 2
    for bucket, step in runner.executables.steps.items():
        runner._prepare(bucket, step)
        assert bits(runner) == before, bucket
    engine.close()


def test_a_step_is_launched_empty_before_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make_engine(SMALL)
    launches: list[tuple[str, bool]] = []
    start = runner._start

    def record(bucket: Any, step: Any, plan: Any) -> Any:
        launches.append((str(bucket), any(any(lane.sizes) for lane in plan.lanes)))
        return start(bucket, step, plan)

    monkeypatch.setattr(runner, "_start", record)
    monkeypatch.setattr(runner, "empty_launches", 2)
    runner.warm_up(runner.buckets.buckets)
    assert sorted(launches) == sorted([(str(b), False) for b in runner.buckets.buckets] * 2)
    launches.clear()
    engine.submit(request(0))
    while engine.has_work:
        engine.step()
    assert launches and all(has_sequences for _, has_sequences in launches)
    engine.close()
