"""Five hundred requests, as many drafts as chance says in every step, good and hostile drafters:
the plain tokens.

Chunked, cached, preempted and mixed, on real weights. Tier (b): where greedy tokens differ, the two
best were chosen by less than the bound; the draws of sampled tokens do not come as close here.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.completion import Completion
from jaxserve.config import EngineOptions
from jaxserve.engine.host.prompt_lookup import PromptLookup
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.host.speculation import DeviceDrafts, Proposer, Speculation
from jaxserve.llm import LLM
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams

FOLDER = Path(__file__).parents[2] / "checkpoints" / "bundled"
MODEL, DRAFT = FOLDER / "tiny-chat", FOLDER / "tiny-chat-draft"
COUNT, MOST, BOUND = 500, 7, 1e-4
OPTIONS = EngineOptions(
    max_batch=8, step_tokens=48, page_size=16, cache_tokens=288, max_context=256
)
PLAIN = replace(OPTIONS, step_tokens=512, cache_tokens=4096, prefix_cache=False)
BEGINNINGS = (
    "Once upon a time, there was a",
    "The little dog",
    "One day, a girl named Lily went to the park.",
    "Tom",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Moody(Speculation):
    """Another number of drafts in every step, for another part of the sequences."""

    def __init__(self, proposer: Proposer):
        super().__init__(proposer, MOST)
        self._draw = random.Random(3)

    def draft(
        self, seqs: Iterable[Sequence], rows: int, plain: int, limit: int
    ) -> dict[int, list[int]]:
        count = self._draw.randrange(MOST + 1)
        chosen = [seq for seq in seqs if self._draw.random() < 0.8]
        found = {seq.id: self.proposer.propose(seq)[:count] for seq in chosen}
        return {id: tokens for id, tokens in found.items() if tokens}


class Hostile:
    """A Proposer of tokens that nobody would say, of the newest one over and over, and of too
    many."""

    waits, has_pages = True, False

    def __init__(self) -> None:
        self._draw = random.Random(8)

    def takes(self, request: Request) -> bool:
        return True

    def propose(self, seq: Sequence) -> list[int]:
        if self._draw.random() < 0.5:
            return [seq.tokens[-1]] * (MOST + 4)
        return [self._draw.randrange(256) for _ in range(MOST + 4)]

    def forget(self, seq: Sequence) -> None:
        pass


def asked() -> tuple[list[str], list[SamplingParams]]:
    """Greedy and sampled by turns; many share a beginning, and some repeat themselves."""
    draw, prompts, params = random.Random(1), [], []
    for i in range(COUNT):
        begin = BEGINNINGS[i % len(BEGINNINGS)]
        prompts.append(
            " ".join([begin] * draw.choice((1, 1, 2, 4))) + " " + "and " * draw.randrange(4)
        )
        sampled = (
            {"temperature": 1.0, "top_p": 0.95} if i % 2 else {"temperature": 0.0, "logprobs": 2}
        )
        penalised = {"frequency_penalty": 0.5} if i % 5 == 0 else {}
        params.append(
            SamplingParams(**sampled, **penalised, seed=i, max_tokens=draw.choice((4, 12, 40)))
        )
    return prompts, params


def answers(
    model: Path, options: EngineOptions, proposer: Proposer | None = None
) -> tuple[list[Completion], LLM]:
    draft = DRAFT if options.speculate == "draft" else None
    with LLM(model, dtype="float32", options=options, draft_model=draft) as llm:
        if proposer:
            llm.engine.scheduler.speculation = Moody(proposer)
        return llm.generate(*asked()), llm


def check(found: list[Completion], expected: list[Completion]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        if mine.token_ids == theirs.token_ids:
            assert mine.finish_reason == theirs.finish_reason
            continue
        pairs = zip(mine.token_ids, theirs.token_ids, strict=False)
        step = next(n for n, (ours, other) in enumerate(pairs) if ours != other)
        assert theirs.logprobs, "a sampled token"
        (_, first), (_, second) = theirs.logprobs[step].top
        assert first - second < BOUND


@pytest.fixture(scope="module")
def plain() -> list[Completion]:
    return answers(MODEL, PLAIN)[0]


@pytest.mark.parametrize(
    ("speculate", "new_proposer", "share"),
    [
        ("draft", lambda: DeviceDrafts(MOST, True), (0.3, 1.0)),
        ("ngram", lambda: PromptLookup(MOST), (0.02, 1.0)),
        ("ngram", Hostile, (0.0, 0.1)),
    ],
    ids=["draft model", "prompt lookup", "hostile"],
)
def test_the_bundled_pair(
    speculate: str,
    new_proposer: Callable[[], Proposer],
    share: tuple[float, float],
    plain: list[Completion],
) -> None:
    options = replace(OPTIONS, speculate=speculate, draft_tokens=MOST)
    found, llm = answers(MODEL, options, new_proposer())
    check(found, plain)
    speculation = llm.engine.scheduler.speculation
    assert speculation and speculation.drafted > 1000 and llm.engine.scheduler.preemptions > 0
    assert share[0] <= speculation.accepted / speculation.drafted <= share[1]
    assert sum(completion.timings.cached_tokens for completion in found) > 1000


def test_babyllama_with_prompt_lookup(data_folder: Path) -> None:
    model = data_folder / "models" / "babyllama"
    found, llm = answers(
        model, replace(OPTIONS, speculate="ngram", draft_tokens=MOST), PromptLookup(MOST)
    )
    check(found, answers(model, PLAIN)[0])
    speculation = llm.engine.scheduler.speculation
    assert speculation and speculation.accepted > 100
