"""Budgets of thoughts in an engine, against the same engine given what the budget leads to."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.host.speculation import Speculation
from jaxserve.errors import RequestError
from jaxserve.request import Request, ThoughtBudget
from jaxserve.sampling_params import SamplingParams
from tests.jaxserve.engine.tiny import (
    BASE,
    SPEC,
    Outcome,
    largest_of_each_kind,
    make_engine,
    run,
)
from tests.slow_cases import slow_but

PROMPT = (3, 1, 4, 1, 5)
TOKENS = 24
DRAFTS = 7
SAMPLED = SamplingParams(temperature=0.8, seed=11, max_tokens=TOKENS, frequency_penalty=0.3)
OPTIONS = {
    "plain": BASE,
    "4 a launch": replace(BASE, decode_steps=4),
    "deterministic": replace(BASE, step_tokens=8, deterministic=True),
}


@pytest.fixture(scope="module", params=OPTIONS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine, runner = make_engine(OPTIONS[request.param])
    runner.warm_up(largest_of_each_kind(runner))
    yield engine
    engine.close()


def answer(engine: Engine, *requests: Request) -> list[Outcome]:
    outcomes = run(engine, [(0, request) for request in requests])
    return [outcomes[request.id, 0] for request in requests]


def free(engine: Engine) -> list[int]:
    """Return the tokens of an answer without a budget."""
    return answer(engine, Request(id="free", prompt=PROMPT, params=SAMPLED))[0].tokens


def unused(tokens: list[int]) -> int:
    """Return a token that does not occur."""
    return next(token for token in range(SPEC.vocab_size) if token not in tokens)


def test_what_follows_is_the_answer_to_a_closed_thought(engine: Engine) -> None:
    tokens = free(engine)
    end = unused(tokens)
    closing = (end, 7, end, 2)
    ask = Request(id="", prompt=PROMPT, params=SAMPLED)
    budget = ThoughtBudget(6, end=end, closing=closing)
    rest = replace(SAMPLED, max_tokens=TOKENS - 10, frequency_penalty=0.0)
    closed, opened, beside = answer(
        engine,
        replace(ask, id="closed", thought_budget=budget),
        replace(ask, id="opened", thought_budget=replace(budget, tokens=5, opening=(tokens[0],))),
        replace(ask, id="beside"),
    )
    assert closed.tokens[:10] == [*tokens[:6], *closing]
    assert opened.tokens == closed.tokens
    assert beside.tokens == tokens
    # Without penalties, which count what was generated, the rest continues a prompt.
    plain = replace(ask, params=replace(SAMPLED, frequency_penalty=0.0))
    whole = answer(engine, replace(plain, id="whole", thought_budget=budget))[0].tokens
    behind = Request(id="behind", prompt=(*PROMPT, *whole[:10]), params=rest)
    assert answer(engine, behind)[0].tokens == whole[10:]


def test_a_thought_that_has_ended_is_left_alone(engine: Engine) -> None:
    tokens = free(engine)
    other = unused(tokens)
    ask = Request(id="", prompt=PROMPT, params=SAMPLED)
    ends = ThoughtBudget(6, end=tokens[5], closing=(tokens[5],) * 2)
    answers = answer(
        engine,
        replace(ask, id="ended at last", thought_budget=ends),
        replace(ask, id="no thought", thought_budget=ThoughtBudget(6, other, (other,), (other,))),
        replace(ask, id="too long", thought_budget=ThoughtBudget(TOKENS, other, (other,))),
    )
    assert [outcome.tokens for outcome in answers] == [tokens] * 3


def test_a_budget_of_nothing_and_the_end_of_the_answer(engine: Engine) -> None:
    end = unused(free(engine))
    ask = Request(id="", prompt=PROMPT, params=replace(SAMPLED, max_tokens=3, logprobs=2))
    at_once, cut = answer(
        engine,
        replace(ask, id="at once", thought_budget=ThoughtBudget(0, end, (end,))),
        replace(ask, id="cut", thought_budget=ThoughtBudget(1, end, (4, 4, end))),
    )
    assert at_once.tokens[0] == end
    assert cut.tokens[1:] == [4, 4]
    # The model's own logarithm of a probability, however small.
    assert all(-50 < entry.logprob < 0 for entry in cut.logprobs) and len(cut.logprobs) == 3


class Foreseen:
    """Proposer that drafts tokens which are known to come."""

    waits = True
    has_pages = False

    def __init__(self, tokens: list[int]):
        self._tokens = tokens

    def takes(self, request: Request) -> bool:
        return True

    def propose(self, seq: Sequence) -> list[int]:
        return self._tokens[len(seq.tokens) - seq.prompt_len :][:DRAFTS]

    def forget(self, seq: Sequence) -> None:
        pass


@pytest.mark.parametrize("engine", slow_but(list(OPTIONS), ["plain"]), indirect=True)
def test_drafts_change_no_token(engine: Engine) -> None:
    """A thought that ends in drafted tokens is not closed behind them, in the same step."""
    tokens = free(engine)
    budget = ThoughtBudget(7, end=tokens[5], closing=(tokens[5], unused(tokens)))
    ask = Request(id="", prompt=PROMPT, params=SAMPLED, thought_budget=budget)
    expected = answer(engine, ask)[0].tokens
    options = replace(BASE, speculate="ngram", draft_tokens=DRAFTS)
    speculation = Speculation(Foreseen(expected), DRAFTS)
    drafting, runner = make_engine(options, speculation=speculation)
    runner.warm_up(largest_of_each_kind(runner))
    (outcome,) = answer(drafting, ask)
    drafting.close()
    assert outcome.tokens == expected == tokens
    assert speculation.accepted > DRAFTS


@pytest.mark.parametrize(
    ("budget", "problem"),
    [
        (ThoughtBudget(1, end=99, closing=(99,)), "99"),
        (ThoughtBudget(1, end=1, closing=(2,)), "do not end it"),
        (ThoughtBudget(1, end=1, closing=(1,) * 9), "9 tokens; give 1 to 8"),
        (ThoughtBudget(1, end=1, closing=()), "0 tokens; give 1 to 8"),
        (ThoughtBudget(1, end=1, closing=(1,), opening=(-1,)), "-1"),
    ],
)
def test_a_budget_that_cannot_be_met(budget: ThoughtBudget, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        Request(id="", prompt=PROMPT, thought_budget=budget).check(SPEC.vocab_size)
