"""Two features together change no token: each pair against a plain engine.

The plain engine runs one row at a time, prompts whole, nothing shared, on one device. Features that
change the output (other weights, 8-bit pages, a grammar, log-probabilities, several choices) it has
too.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet

from jaxserve.checkpoints.hf import HFCheckpoint
from jaxserve.config import EngineOptions, check_draft_model
from jaxserve.engine.build import plan_config
from jaxserve.engine.device.draft_model import DraftModel, ModelDrafter
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.engine.host.sequence import Sequence as Seq
from jaxserve.engine.host.speculation import DeviceDrafts, Proposer, Speculation
from jaxserve.errors import ConfigError
from jaxserve.loading.spec import read_spec
from jaxserve.request import Request, ThoughtBudget
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.structure import Structure
from tests.jaxserve.engine.host.faults import read_newest_states
from tests.jaxserve.engine.tiny import Outcome, run
from tests.jaxserve.loading.loaded import load_params
from tests.outcome_tables import FEATURE_PAIRS

GOLDEN = Path(__file__).parents[2] / "golden"
STATES = "qwen3_5"  # a model whose layers have recurrent states
DRAFTS = 3
TOKENS = 24
VOCAB = 96
ALONE = EngineOptions(
    max_batch=1, step_tokens=64, page_size=4, cache_tokens=256, max_context=60, prefix_cache=False
)
# Its tokens are allowed by the grammar below where they come.
BUDGET = ThoughtBudget(6, end=61, closing=(31, 61, 80))
BOUNDS = {"auto": 1e-4, "int8": 0.05}  # of log-probabilities between executables, by pages
type Answers = dict[tuple[str, int], Outcome]


@dataclass(frozen=True)
class Setup:
    """One engine and its requests.

    golden: case of tests/golden. draft_golden: case of the draft model. drafter: empty, `host` or
    `model`. asked: parameters of every request, beside temperature 0.
    """

    golden: str = "llama_gqa"
    draft_golden: str = "llama_gqa"
    options: EngineOptions = ALONE
    mesh: tuple[int, int, int] = (1, 1, 1)
    weights: str = "auto"
    drafter: str = ""
    grammar: bool = False
    thinks: bool = False
    asked: tuple[tuple[str, Any], ...] = ()

    def with_options(self, **changes: Any) -> "Setup":
        return replace(self, options=replace(self.options, **changes))

    def with_drafter(self, drafter: str, speculate: str) -> "Setup":
        return replace(self.with_options(speculate=speculate, draft_tokens=DRAFTS), drafter=drafter)

    @property
    def plain_setup(self) -> "Setup":
        """Return the setup of the plain engine that must give the same answers."""
        return replace(self, options=replace(ALONE, kv=self.options.kv), mesh=(1, 1, 1), drafter="")


FEATURES: dict[str, Callable[[Setup], Setup]] = {
    "drafts of the host": lambda setup: setup.with_drafter("host", "ngram"),
    "draft model": lambda setup: setup.with_drafter("model", "draft"),
    "grammar": lambda setup: replace(setup, grammar=True),
    "thought budget": lambda setup: replace(setup, thinks=True),
    "int8 weights": lambda setup: replace(setup, weights="int8"),
    "int8 pages": lambda setup: setup.with_options(kv="int8"),
    "prefix cache": lambda setup: setup.with_options(prefix_cache=True),
    "chunked prompts": lambda setup: setup.with_options(step_tokens=10),
    "preemption": lambda setup: setup.with_options(cache_tokens=72),
    "2 x 1 x 2 devices": lambda setup: replace(setup, mesh=(2, 1, 2)),
    "log-probabilities": lambda setup: replace(setup, asked=(*setup.asked, ("logprobs", 20))),
    "two choices": lambda setup: replace(setup, asked=(*setup.asked, ("n", 2))),
    "recurrent states": lambda setup: replace(setup, golden=STATES),
}
QUICK = (
    ("thought budget", "preemption"),
    ("draft model", "preemption"),
    ("grammar", "prefix cache"),
    ("drafts of the host", "recurrent states"),
)


def pairs() -> Iterator[ParameterSet]:
    """Yield all pairs that are not refused.

    `make test` runs a few; `make feature-pairs` runs all and writes the table.
    """
    for pair in combinations(FEATURES, 2):
        if pair not in FEATURE_PAIRS.refused:
            yield pytest.param(
                *pair, marks=[] if pair in QUICK else [pytest.mark.slow], id=" + ".join(pair)
            )


@pytest.mark.parametrize(("one", "other"), list(pairs()))
def test_a_pair(one: str, other: str) -> None:
    setup = FEATURES[other](FEATURES[one](Setup(options=replace(ALONE, max_batch=4))))
    expected = plain_answers(setup.plain_setup)
    found, engine = answers(setup, expected)
    for name, outcome in found.items():
        check_equal_outcomes(
            outcome, expected[name], BOUNDS[setup.options.kv], exact=setup.options.kv == "auto"
        )
    check_features_were_used(setup, found, engine)


def test_one_drafter_at_a_time() -> None:
    """--speculate names one drafter, and LLM refuses a draft model beside prompt lookup."""
    assert ("drafts of the host", "draft model") in FEATURE_PAIRS.refused
    with pytest.raises(ConfigError, match="--draft-model is small; it drafts nothing"):
        check_draft_model(EngineOptions(speculate="ngram"), "small")


def test_a_draft_model_with_a_state_is_refused() -> None:
    setup = replace(Setup(), golden=STATES, draft_golden=STATES)
    with pytest.raises(ConfigError, match="the draft model's layers have a recurrent state"):
        answers(setup.with_drafter("model", "draft"), {})


def test_the_state_of_another_sequence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    read_newest_states(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_pair("prefix cache", "recurrent states")


@cache
def plain_answers(plain_setup: Setup) -> Answers:
    return answers(plain_setup, {})[0]


def answers(setup: Setup, expected: Answers) -> tuple[Answers, Engine]:
    """Answer both golden prompts four times; each request comes while others are running."""
    mesh = MeshSpec(*setup.mesh).build(jax.devices())
    checkpoint = HFCheckpoint.open(GOLDEN / setup.golden)
    spec = read_spec(checkpoint.config)[1].on(setup.mesh[2])
    params = load_params(checkpoint, mesh, "float32", weights=setup.weights)
    draft = draft_model(setup, mesh) if setup.drafter == "model" else None
    options = setup.options
    if spec.state and options.prefix_cache:
        options = replace(options, snapshot_share=0.8)  # a state is larger than all of these pages
    config = plan_config(spec, params, mesh, options, draft=draft)
    proposers: dict[str, Proposer] = {
        "model": DeviceDrafts(DRAFTS, True),
        "host": OracleProposer(expected),
    }
    speculation = Speculation(proposers[setup.drafter], DRAFTS) if setup.drafter else None
    drafter = ModelDrafter(draft, config, mesh) if draft else None
    runner = DeviceRunner(spec, params, config, mesh, drafter)
    runner.warm_up(
        {b.kind: b for b in sorted(runner.buckets.buckets) if b.kind != "score"}.values()
    )
    engine = Engine(Scheduler(config, fingerprint="pairs", speculation=speculation), runner)
    found = run(engine, [(3 * i, request) for i, request in enumerate(requests(setup))])
    assert runner.compiles_after_ready == 0
    engine.close()
    return found, engine


def draft_model(setup: Setup, mesh: jax.sharding.Mesh) -> DraftModel:
    checkpoint = HFCheckpoint.open(GOLDEN / setup.draft_golden)
    spec = read_spec(checkpoint.config)[1].on(setup.mesh[2])
    return DraftModel(spec, load_params(checkpoint, mesh, "float32", weights=setup.weights))


def requests(setup: Setup) -> list[Request]:
    prompts = np.load(GOLDEN / setup.golden / "golden.npz")["prompts"].tolist()
    structure = Structure.of("json_object", True) if setup.grammar else None
    asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": TOKENS, "structure": structure}
    sampling = SamplingParams(**asked | dict(setup.asked))
    grammar = ModuloGrammar() if setup.grammar else None
    return [
        Request(
            id=str(i),
            prompt=tuple(prompts[i % 2]),
            params=sampling,
            eos_ids=(),
            grammar=grammar,
            # The last one would have to begin with a token that does not come.
            thought_budget=replace(BUDGET, opening=(0,) if i == 7 else ())
            if setup.thinks
            else None,
        )
        for i in range(8)
    ]


class OracleProposer:
    """Proposer that drafts the plain engine's output, with a wrong token now and then."""

    waits = True
    has_pages = False

    def __init__(self, expected: Answers):
        self._expected = expected
        self._draw = random.Random(2)

    def takes(self, request: Request) -> bool:
        return True

    def propose(self, seq: Seq) -> list[int]:
        known = self._expected[seq.request.id, seq.index].tokens[len(seq.tokens) - seq.prompt_len :]
        return [(token + (self._draw.random() < 0.2)) % VOCAB for token in known[:DRAFTS]]

    def forget(self, seq: Seq) -> None:
        pass


class ModuloGrammar:
    """Grammar and its matcher: token t may be the nth of the text where (t + n) % 3 > 0.

    Every fifth token is prescribed, and the 20th is the last.
    """

    failure = ""

    def __init__(self, length: int = 0):
        self._length = length

    def matcher(self) -> "ModuloGrammar":
        return ModuloGrammar()

    def masks(self, drafted: Sequence[int] = ()) -> list[bytes]:
        found = [self._mask(self._length)]
        for n in range(self.fits(drafted)):
            if self._length + n + 1 < 20:
                found.append(self._mask(self._length + n + 1))
        return found

    def fits(self, tokens: Sequence[int], free: bool = False) -> int:
        for n, token in enumerate(tokens):
            at = self._length + n
            if at == 20 or token not in self._allowed(at):
                return n
            if free and at + 1 < 20 and len(self._allowed(at + 1)) == 1:
                return n
        return len(tokens)

    def accept(self, token: int) -> bool:
        taken = token in self._allowed(self._length)
        self._length += taken
        return taken

    def forced(self) -> list[int]:
        allowed = self._allowed(self._length)
        return allowed if len(allowed) == 1 else []

    @property
    def ended(self) -> bool:
        return self._length == 20

    def _allowed(self, n: int) -> list[int]:
        return (
            [7 * n % VOCAB] if n % 5 == 4 else [token for token in range(VOCAB) if (token + n) % 3]
        )

    def _mask(self, n: int) -> bytes:
        return sum(1 << token for token in self._allowed(n)).to_bytes(VOCAB // 8, "little")


def check_equal_outcomes(one: Outcome, other: Outcome, bound: float, exact: bool) -> None:
    """Check for equal tokens, ends and log-probabilities within the bound.

    Unless `exact`, tokens may differ from a choice by less than the bound on.
    """
    if exact:
        assert one.tokens == other.tokens
    shared = next(
        (
            n
            for n, pair in enumerate(zip(one.tokens, other.tokens, strict=False))
            if pair[0] != pair[1]
        ),
        None,
    )
    assert shared is None or shared >= TOKENS // 2, "8 bits change few tokens"
    assert shared is not None or len(one.tokens) == len(other.tokens)
    assert one.last and other.last and one.last.finish and other.last.finish
    assert one.last.finish.reason == other.last.finish.reason
    for mine, theirs in list(zip(one.logprobs, other.logprobs, strict=False))[:shared]:
        ours = dict(mine.top)
        known = dict(theirs.top)
        both = ours.keys() & known.keys()
        assert len(both) >= 18, "20 alternatives differ by more than ties at their end"
        assert max(abs(ours[token] - known[token]) for token in both) < bound


def check_features_were_used(setup: Setup, found: Answers, engine: Engine) -> None:
    times = [
        outcome.last.times for outcome in found.values() if outcome.last and outcome.last.times
    ]
    scheduler = engine.scheduler
    options = setup.options
    assert len(times) == len(found)
    # With a grammar a draft model drafts nothing: masks for its drafts are not known ahead.
    if setup.drafter and not (setup.grammar and setup.drafter == "model"):
        # A draft model that is not the model itself is right by chance.
        by_chance = setup.drafter == "model" and setup.draft_golden != setup.golden
        assert sum(t.drafted if by_chance else t.accepted for t in times) > 20
    if setup.drafter == "host":
        assert sum(t.accepted for t in times) < sum(t.drafted for t in times)
    assert (sum(t.cached for t in times) > 0) == options.prefix_cache
    assert (scheduler.preemptions > 0) == (options.cache_tokens == 72)
    if setup.grammar:
        assert {len(outcome.tokens) for outcome in found.values()} == {20}
        assert all(
            outcome.last and outcome.last.finish.reason == "stop" for outcome in found.values()
        )  # type: ignore[union-attr]
    if setup.thinks:
        closed = {id for (id, _), outcome in found.items() if outcome.tokens[6:9] == [31, 61, 80]}
        assert closed == set("0123456")
    if ("logprobs", 20) in setup.asked:
        assert all(len(outcome.logprobs) == len(outcome.tokens) for outcome in found.values())
