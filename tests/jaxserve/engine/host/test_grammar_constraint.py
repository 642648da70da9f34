"""Rows that follow a grammar: every answer is that of a naive loop that masks and samples."""

import dataclasses
from itertools import pairwise
from typing import Any

import pytest

from jaxserve.engine.events import FinishReason
from jaxserve.errors import GrammarError
from jaxserve.request import Request
from jaxserve.structure import Structure
from tests.fake_grammar import END, TableGrammar
from tests.jaxserve.engine.host.driver import (
    Driver,
    EagerProposer,
    ScriptedProposer,
    config_of,
    request,
)

SOME = Structure.of("json_object", True)


def constrained_request(name: str, grammar: TableGrammar, **params: Any) -> Request:
    """Return a request for 24 tokens that follow the grammar, unless `params` say otherwise."""
    plain = request(name, **({"structure": SOME, "max_tokens": 24} | params))
    return dataclasses.replace(plain, grammar=grammar, eos_ids=(END,))


def submit_mixed_requests(driver: Driver, count: int = 12) -> None:
    """Submit requests with and without a grammar, one after the other."""
    for i in range(count):
        salt = "w" if i % 2 else ""
        prompt = tuple(range(1, 3 + 5 * i % 17))
        if i % 3 == 2:
            driver.submit(request(f"plain{i}", prompt=prompt, salt=salt, seed=i, max_tokens=9))
        else:
            driver.submit(
                constrained_request(
                    f"g{i}", TableGrammar.random(i), prompt=prompt, salt=salt, seed=i, n=1 + i % 2
                )
            )
        driver.step()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_pages": 17},  # preemption
        {"lanes": 2},
        {"decode_steps": 4},
        {"deterministic": True},
        {"windows": (6, None)},
        {"step_tokens": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("drafts", [False, True])
def test_every_row_is_as_the_naive_loop_says(changes: dict[str, Any], drafts: bool) -> None:
    """The driver compares every answer, and checks pages and plans at every step."""
    window = changes.get("windows", (None,))[0]
    driver = Driver(
        config_of(**changes), proposer=ScriptedProposer(window=window) if drafts else None
    )
    submit_mixed_requests(driver)
    driver.run()
    reasons = {result.finish.reason for result in driver.results.values() if result.finish}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    if changes == {"num_pages": 17}:
        assert driver.scheduler.preemptions
    if drafts and not changes:
        assert driver.scheduler.speculation and driver.scheduler.speculation.accepted


def forcing_grammar(length: int, branch: int) -> TableGrammar:
    """Return a grammar that forces every token but the one in state `branch`, which has two."""
    edges = [{10 + i: i + 1} for i in range(length)]
    edges[branch][50] = branch + 1
    return TableGrammar((*edges, {}))


def test_what_the_grammar_forces_is_not_sampled() -> None:
    driver = Driver(config_of())
    driver.submit(constrained_request("a", forcing_grammar(20, 9)))
    driver.run()
    sampled = sum(sum(lane.samples) for plan in driver.plans for lane in plan.lanes)
    # The first token is sampled, and the one with two ways.
    assert sampled == 2 and len(driver.results["a", 0].tokens) == 20


@pytest.mark.parametrize(
    "asked", [{"logprobs": 0}, {"presence_penalty": 1.0}, {"allowed_token_ids": range(97)}], ids=str
)
def test_every_token_is_sampled_where_each_has_to_be(asked: dict[str, Any]) -> None:
    driver = Driver(config_of())
    driver.submit(constrained_request("a", forcing_grammar(20, 9), **asked))
    driver.run()
    assert sum(sum(lane.samples) for plan in driver.plans for lane in plan.lanes) == 20


def test_the_first_tokens_of_all_that_is_forced_are_those_of_max_tokens() -> None:
    driver = Driver(config_of())
    driver.submit(constrained_request("a", forcing_grammar(20, 9), max_tokens=5))
    driver.run()
    assert driver.results["a", 0].tokens == [10, 11, 12, 13, 14]


def test_a_row_with_a_grammar_delays_no_other_row() -> None:
    """A row with a grammar joins every other step; other rows are in all of them."""
    driver = Driver(config_of(step_tokens=32))
    driver.submit(
        constrained_request("a", TableGrammar(({t: 0 for t in range(90)},)), max_tokens=10)
    )
    driver.submit(request("b", max_tokens=20))
    driver.run()
    alone = Driver(config_of(step_tokens=32))
    alone.submit(request("b", max_tokens=20))
    alone.run()
    steps = [driver.request_ids(plan) for plan in driver.plans]
    assert sum("b" in names for names in steps) == len(alone.plans)
    assert not any("a" in one and "a" in other for one, other in pairwise(steps))


def test_a_dead_end_ends_the_choice_with_an_error() -> None:
    # The driver does not compare answers of a device whose executables differ.
    driver = Driver(config_of(), executables_differ=True)
    driver.submit(constrained_request("a", forcing_grammar(4, 0), allowed_token_ids=(10, 50, 11)))
    driver.submit(constrained_request("b", forcing_grammar(4, 0)))
    driver.run()
    finish = driver.results["a", 0].finish
    assert (
        finish and finish.reason is FinishReason.ERROR and driver.results["a", 0].tokens[-1] == 11
    )
    assert isinstance(
        finish.error, GrammarError
    ) and "json_object cannot be followed beyond 2" in str(finish.error)
    assert driver.results["b", 0].tokens[-1] == 13


def test_a_grammar_that_cannot_begin_is_refused() -> None:
    driver = Driver(config_of())
    with pytest.raises(
        GrammarError, match=r"json_object cannot be followed beyond 0 tokens: no token can follow"
    ):
        driver.engine.submit(
            constrained_request("a", forcing_grammar(4, 0), allowed_token_ids=(11, 12))
        )
    assert not driver.engine.has_work


@pytest.mark.parametrize("step_tokens", [4, 5, 8, 11])
def test_what_is_forced_is_cut_anywhere(step_tokens: int) -> None:
    """The last forced token may have a step of its own; the driver compares pages and tokens."""
    free = dict.fromkeys(range(90), 10)
    driver = Driver(config_of(step_tokens=step_tokens))
    driver.submit(
        constrained_request(
            "a", TableGrammar((*({10 + i: i + 1} for i in range(9)), free, free)), max_tokens=16
        )
    )
    driver.run()
    assert driver.results["a", 0].tokens[:9] == list(range(10, 19))


def test_a_grammar_that_fails_for_a_later_choice_leaves_nothing_behind() -> None:
    class FailsTheSecondTime:
        calls = 0

        def matcher(self) -> Any:
            self.calls += 1
            if self.calls == 2:
                raise GrammarError("structure", "is too large")
            return TableGrammar.random(0).matcher()

    driver = Driver(config_of(), proposer=EagerProposer())
    failing = dataclasses.replace(
        constrained_request("a", TableGrammar.random(0), n=3), grammar=FailsTheSecondTime()
    )
    with pytest.raises(GrammarError, match="too large"):
        driver.engine.submit(failing)
    speculation = driver.scheduler.speculation
    assert speculation and not speculation._records and not driver.engine.has_work
    driver.submit(constrained_request("a", TableGrammar.random(0), n=3))
    assert len(speculation._records) == 3
    driver.run()
    assert not speculation._records
