"""One engine computes a prompt and another continues it, with the answers of transformers.

The two differ in mesh, page size and page dtype.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet

from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.config import EngineOptions
from jaxserve.engine.build import plan_config
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.engine.host.kv_export import PagesToSend
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.engine.kv_segment import KVSegment
from jaxserve.errors import EngineError
from jaxserve.loading.spec import read_spec
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine.test_families_on_meshes import GOLDEN, check
from tests.jaxserve.engine.tiny import Outcome, run
from tests.jaxserve.loading.loaded import load_params

OPTIONS = EngineOptions(
    max_batch=2, step_tokens=16, page_size=4, cache_tokens=128, max_context=60, page_exchange=True
)


@dataclass(frozen=True)
class Side:
    """Mesh and pages of one engine. first: index of its first device."""

    mesh: tuple[int, int, int] = (1, 1, 1)
    page_size: int = 4
    kv: str = "auto"
    first: int = 0


class House:
    """Engine of a golden model, with the requests of its clients."""

    def __init__(self, case: str, side: Side):
        self.golden = np.load(GOLDEN / case / "golden.npz")
        self.prompt = tuple(self.golden["prompts"][0].tolist())
        mesh = MeshSpec(*side.mesh).build(jax.devices()[side.first :])
        checkpoint = HFCheckpoint.open(GOLDEN / case)
        spec = read_spec(checkpoint.config)[1].on(side.mesh[2])
        params = load_params(checkpoint, mesh, "float32")
        options = replace(OPTIONS, page_size=side.page_size, kv=side.kv)
        if spec.state:
            options = replace(options, snapshot_share=0.8)  # a state is larger than these pages
        self.config = plan_config(spec, params, mesh, options)
        self.runner = DeviceRunner(spec, params, self.config, mesh)
        buckets = {
            b.kind: b
            for b in sorted(self.runner.buckets.buckets)
            if b.kind in ("decode", "prefill")
        }
        self.runner.warm_up(buckets.values())
        self.engine = Engine(
            Scheduler(self.config, fingerprint=str(side)), self.runner, pages=self.runner.pages
        )

    def request(self, name: str, prompt: tuple[int, ...], **params: Any) -> Request:
        asked = SamplingParams(temperature=0, ignore_eos=True, **params)
        return Request(id=name, prompt=prompt, params=asked, eos_ids=())

    def ask(self, name: str, prompt: tuple[int, ...], **params: Any) -> Outcome:
        asked = self.request(name, prompt, **params)
        return run(self.engine, [(0, asked)])[name, 0]

    def pieces(
        self, name: str, start: int, page_size: int, compute: bool = True
    ) -> list[KVSegment]:
        """Return the KV segments of the prompt, computed for a request or found in the cache."""
        return [outgoing.to_host() for outgoing in self.parts(name, start, page_size, compute)]

    def parts(
        self, name: str, start: int, page_size: int, compute: bool = True
    ) -> Iterator[PagesToSend]:
        """Yield exported pages of the prompt; each must be taken before the next."""
        found: list[PagesToSend | None] = []
        asked = self.request(name, self.prompt, max_tokens=1)
        if compute:
            self.engine.submit(asked)
        self.engine.transfers.export(asked, start, page_size, found.append)
        while None not in found or len(found) > 1:
            if self.engine.has_work:
                self.engine.step()
            while found and (outgoing := found[0]):
                yield outgoing
                del found[0]
            self.engine.transfers.advance()

    def install(self, pieces: list[KVSegment]) -> int:
        arriving = self.engine.transfers.receive(self.prompt)
        for piece in pieces:
            for staged in arriving.stage(piece, timeout=60):
                arriving.install(staged)
                self.engine.scheduler.check_invariants()
        return arriving.installed


def transfer_prompt(case: str, here: Side, there: Side) -> tuple[House, list[KVSegment]]:
    """Return the engine where the prompt has arrived, and its segments; compile nothing for it."""
    one = House(case, here)
    other = House(case, there)
    compiles = one.runner.compiles_after_ready
    pieces = one.pieces(
        "prefill", other.engine.transfers.receive(other.prompt).cached, there.page_size
    )
    other.install(pieces)
    assert (one.runner.compiles_after_ready, other.runner.compiles_after_ready) == (compiles, 0)
    one.engine.close()
    return other, pieces


def cases() -> Iterator[ParameterSet]:
    """Yield all cases; `make test` runs the first of two models, one of them with states."""
    sides = {
        "llama_gqa": [
            (Side((1, 1, 4)), Side((2, 1, 2), page_size=8)),
            (Side((1, 1, 2), page_size=8), Side((1, 1, 4))),
            (Side(), Side(page_size=3)),
        ],
        "gpt_oss_head_dim": [
            (Side((1, 1, 2)), Side(page_size=8)),
            (Side((1, 2, 1), page_size=6), Side((1, 1, 4))),
        ],
        "mistral_window": [(Side(page_size=2), Side((1, 1, 4), page_size=8))],
        "deepseek_v2_lite": [
            (Side((1, 1, 2)), Side((2, 1, 1), page_size=2)),
            (Side(), Side((1, 4, 2))),
        ],
        "qwen3_5": [
            (Side((1, 1, 2)), Side((2, 1, 1))),
            (Side((2, 1, 1)), Side((1, 1, 4))),
        ],
        "lfm2_moe": [(Side(), Side((1, 2, 2)))],
    }
    for case, pairs in sides.items():
        for i, (here, there) in enumerate(pairs):
            quick = i == 0 and case in ("llama_gqa", "qwen3_5")
            marks = [] if quick else [pytest.mark.slow]
            yield pytest.param(
                case, here, there, marks=marks, id=f"{case}-{here.mesh}-{there.mesh}"
            )


@pytest.mark.parametrize(("case", "here", "there"), list(cases()))
def test_tokens_are_those_of_one_engine(case: str, here: Side, there: Side) -> None:
    other, _ = transfer_prompt(case, here, there)
    reach = min(24 // here.page_size * here.page_size, 23) // there.page_size * there.page_size
    assert other.engine.transfers.receive(other.prompt).cached == reach > 0
    outcome = other.ask("decode", other.prompt, max_tokens=32, logprobs=20)
    check(outcome, other.golden, 0)
    assert outcome.last and outcome.last.times and outcome.last.times.cached == reach
    assert other.runner.compiles_after_ready == 0


@pytest.mark.parametrize(
    "kv",
    [
        pytest.param("auto", marks=pytest.mark.slow),
        "int8",
        pytest.param("fp8", marks=pytest.mark.slow),
    ],
)
def test_what_arrives_is_what_was_sent(kv: str) -> None:
    """Pages are equal bit for bit when read again, on four devices with two copies of each head."""
    other, sent = transfer_prompt(
        "gpt_oss_head_dim", Side(kv=kv), Side((1, 1, 4), page_size=2, kv=kv)
    )
    again = other.pieces("again", 0, 2, compute=False)
    for group in (0, 1):
        one, two = ([piece for piece in pieces if piece.group == group] for pieces in (sent, again))
        assert one[0].start == two[0].start and two[-1].stop == 22
        for name in sent[0].arrays:
            mine, theirs = (
                np.concatenate([piece.arrays[name] for piece in pieces], axis=1)
                for pieces in (one, two)
            )
            np.testing.assert_array_equal(
                theirs.view(np.uint8), mine[:, : theirs.shape[1]].view(np.uint8)
            )
    assert other.runner.compiles_after_ready == 0


@pytest.mark.slow
def test_a_state_arrives_as_it_was_sent() -> None:
    """It is equal bit for bit when it is read again, on a mesh that splits its heads."""
    other, sent = transfer_prompt("qwen3_5", Side(), Side((2, 1, 2)))
    again = other.pieces("again", 0, 4, compute=False)
    (mine,), (theirs,) = ([each for each in pieces if each.group == 1] for pieces in (sent, again))
    assert (mine.start, mine.stop) == (theirs.start, theirs.stop) == (19, 20)
    np.testing.assert_array_equal(theirs.k, mine.k)
    assert mine.k.any() and other.runner.compiles_after_ready == 0


def test_a_state_of_another_model_is_refused() -> None:
    other, sent = transfer_prompt("lfm2_moe", Side(), Side())
    (state,) = (each for each in sent if each.group == 1)
    small = replace(state, k=state.k[..., :-1])
    with pytest.raises(EngineError, match=r"keys \[2, 1, 4, 15\] and no values; the model's are"):
        other.install([small])


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
def test_narrowed_on_the_way(kv: str) -> None:
    """Narrowed pages equal those of an engine with such pages that computes the prompt."""
    other, _ = transfer_prompt("llama_gqa", Side(), Side(kv=kv, page_size=8))
    alone = House("llama_gqa", Side(kv=kv, page_size=8))
    outcomes = [
        house.ask("decode", house.prompt, max_tokens=4, logprobs=20) for house in (other, alone)
    ]
    assert outcomes[0].last and outcomes[0].last.times and outcomes[0].last.times.cached == 16
    one, two = (dict(outcome.logprobs[0].top) for outcome in outcomes)
    both = one.keys() & two.keys()
    assert len(both) >= 18 and max(abs(one[token] - two[token]) for token in both) < 0.05


def test_while_others_run_on_both_sides() -> None:
    """A prompt arrives part by part between the steps of an engine that decodes another one."""
    one = House("llama_gqa", Side((1, 1, 2)))
    other = House("llama_gqa", Side(page_size=8))
    second = tuple(other.golden["prompts"][1].tolist())
    other.engine.submit(other.request("runs", second, max_tokens=32, logprobs=20))
    outcome = Outcome()
    pieces = one.pieces("prefill", 0, 8)
    arriving = other.engine.transfers.receive(other.prompt)
    staged = (staged for piece in pieces for staged in arriving.stage(piece, timeout=60))
    while other.engine.has_work:
        for event in other.engine.step():
            outcome.add(event)
        if part := next(staged, None):
            arriving.install(part)
        other.engine.scheduler.check_invariants()
    check(outcome, other.golden, 1)
    assert arriving.installed == 2
    check(other.ask("decode", other.prompt, max_tokens=32, logprobs=20), other.golden, 0)
