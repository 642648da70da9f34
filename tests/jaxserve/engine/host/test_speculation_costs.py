"""Number of drafted tokens to verify, by simulated costs of steps; and prompt lookup."""

import random
from collections import Counter

import pytest

from jaxserve.engine.buckets import draft_counts
from jaxserve.engine.host.prompt_lookup import PromptLookup
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.host.speculation import (
    LONGEST_PAUSE,
    Costs,
    DeviceDrafts,
    Speculation,
    best_draft_count,
    expected_tokens,
)
from jaxserve.engine.plan import StepOutput, StepPlan
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.fake_model import VOCAB, naive
from tests.jaxserve.engine.host.driver import Driver, EagerProposer, config_of, request

ROWS = (1, 2, 4, 8, 16)
DRAFTS = (0, *draft_counts(7))


def linear_costs(base: float, per_token: float) -> Costs:
    """Return costs of a base per step and a share per token, for all compiled sizes."""
    return Costs({(rows, k): base + per_token * rows * (1 + k) for rows in ROWS for k in DRAFTS})


def sequence(tokens: list[int], id: int = 1) -> Sequence:
    asked = Request(id=str(id), prompt=tuple(tokens), params=SamplingParams())
    return Sequence(id, asked, 0, 0, 100, tokens=list(tokens))


def test_expected_tokens_are_a_geometric_series() -> None:
    for chance in (0.0, 0.3, 0.99, 1.0):
        for drafts in range(9):
            assert expected_tokens(chance, drafts) == pytest.approx(
                sum(chance**i for i in range(drafts + 1))
            )


@pytest.mark.parametrize("seed", range(200))
def test_never_slower_than_without(seed: int) -> None:
    """The choice is never worse than no drafts, by the very costs and chances given."""
    draw = random.Random(seed)
    table = Costs({(rows, k): draw.uniform(0.1, 10) for rows in ROWS for k in DRAFTS})
    drafted = [(draw.random(), draw.randrange(1, 8)) for _ in range(draw.randrange(1, 10))]
    plain = draw.randrange(6)
    rows = plain + len(drafted)
    chosen = best_draft_count(table, rows, plain, drafted)
    tokens = plain + sum(expected_tokens(chance, min(count, chosen)) for chance, count in drafted)
    assert tokens / table.of(rows, chosen) >= (plain + len(drafted)) / table.of(rows, 0)


def test_a_chip_that_is_busy_verifies_nothing_and_one_that_waits_for_memory_all() -> None:
    drafted = [(0.8, 7)] * 8
    assert best_draft_count(linear_costs(0, 1), 8, 0, drafted) == 0
    assert best_draft_count(linear_costs(1, 0), 8, 0, drafted) == 7
    assert best_draft_count(linear_costs(1, 0.04), 8, 0, drafted) in (1, 3)
    assert best_draft_count(linear_costs(1, 0), 8, 0, [(0.0, 7)] * 8) == 0, "of equals the fewest"


def test_costs_of_rows_between_the_compiled_ones() -> None:
    table = linear_costs(1, 1)
    assert table.of(3, 1) == table.seconds[4, 1] and table.of(99, 0) == table.seconds[16, 0]


class AlwaysProposer:
    waits = True
    has_pages = False

    def takes(self, request: Request) -> bool:
        return True

    def propose(self, seq: Sequence) -> list[int]:
        return [7, 7, 7]

    def forget(self, seq: Sequence) -> None:
        pass


def test_a_sequence_whose_drafts_fail_drafts_ever_more_rarely() -> None:
    """A sequence whose drafts are accepted does not pause."""
    speculation = Speculation(AlwaysProposer(), 7, linear_costs(1, 0.05))
    good = sequence([1, 2], 1)
    bad = sequence([1, 2], 2)
    drafted = {good.id: 0, bad.id: 0}
    for seq in (good, bad):
        speculation.enter(seq)
    for _ in range(400):
        for seq in (good, bad):
            seq.tokens.append(7)
        speculation.wake([good, bad], verifying=True)
        for seq in (good, bad):
            if seq.waits_for_host and (tokens := speculation.draft([seq], 1, 0, 7).get(seq.id)):
                drafted[seq.id] += 1
                speculation.learn(seq, len(tokens), len(tokens) if seq is good else 0)
    assert drafted[good.id] > 390
    assert drafted[bad.id] < 60
    assert drafted[bad.id] >= 400 // LONGEST_PAUSE, "it tries again"


def submit_requests(driver: Driver, count: int) -> None:
    """Submit requests for 40 tokens with different seeds."""
    for i in range(count):
        driver.submit(request(f"{len(driver.results)}", max_tokens=40, seed=i))


class WrongThenRightProposer(EagerProposer):
    """Proposer of wrong tokens for the first `wrong` ones of a sequence, and right ones after."""

    def __init__(self, wrong: int):
        super().__init__(7)
        self._wrong = wrong

    def propose(self, seq: Sequence) -> list[int]:
        right = naive(seq.request, seq.index, seq.seed, seq.num_generated + 7)[seq.num_generated :]
        return (
            right if seq.num_generated >= self._wrong else [(token + 1) % VOCAB for token in right]
        )


def test_wrong_drafts_are_forgotten() -> None:
    """A sequence forgets wrong drafts after a while, and other sequences never knew of them."""
    late = Speculation(WrongThenRightProposer(30), 7, linear_costs(1, 0.03))
    driver = Driver(config_of(num_pages=200, max_context=700), speculation=late)
    driver.submit(request(max_tokens=600))
    driver.run()
    assert len(driver.plans) < 350 and late.accepted > 300
    after = Speculation(WrongThenRightProposer(40), 7, linear_costs(1, 0.03))
    driver = Driver(config_of(num_pages=200, max_context=128), speculation=after)
    submit_requests(driver, 12)
    driver.run()
    after.proposer = WrongThenRightProposer(0)
    before = after.drafted
    submit_requests(driver, 12)
    driver.run()
    assert after.accepted == after.drafted - before > 200


@pytest.mark.parametrize("step_tokens", [4, 5, 8])
def test_there_is_room_for_every_row_s_drafts(step_tokens: int) -> None:
    """Rows that fill the budget draft nothing, and no step of a draft model comes between."""
    drafter = Speculation(DeviceDrafts(7, has_pages=True), 7, linear_costs(1, 0.01))
    driver = Driver(
        config_of(step_tokens=step_tokens, num_pages=200, max_context=128), speculation=drafter
    )
    submit_requests(driver, 4)
    driver.run()
    kinds = Counter(plan.kind for plan in driver.plans)
    assert (kinds["verify"] > 0) == (step_tokens == 8)
    assert kinds["draft"] <= kinds["verify"] / 2


def test_rows_do_not_wait_for_drafts_that_are_not_verified() -> None:
    """A row of prompt lookup is in every step while prompts go on coming."""
    driver = Driver(
        config_of(num_pages=400, max_context=128, max_batch=3), proposer=PromptLookup(7)
    )
    driver.submit(request("s", max_tokens=40))
    prompts = 0
    while driver.results["s", 0].finish is None:
        if len(driver.scheduler.waiting) < 2:
            driver.submit(
                request(
                    f"p{prompts}",
                    prompt=tuple((7 * prompts + i) % 90 for i in range(60)),
                    max_tokens=1,
                )
            )
            prompts += 1
        driver.step()
    assert (
        prompts > 8
        and sum("s" in driver.request_ids(plan) for plan in driver.plans) > len(driver.plans) - 4
    )


def test_logits_that_are_not_finite_behind_an_end_do_not_matter() -> None:
    end = naive(request(max_tokens=12), 0, 1, 12)[5]
    driver = Driver(config_of(num_pages=40), proposer=WrongThenRightProposer(0))
    launch = driver.runner.launch

    def launch_with_nan_behind_end(plan: StepPlan) -> StepOutput:
        """Launch a step whose logits behind the end token are not finite."""
        output = launch(plan)
        for lane in output.lanes:
            for i, tokens in enumerate(lane.tokens):
                if end in tokens[:-1]:
                    lane.tokens[i] = tokens[: tokens.index(end) + 2]
                    lane.finite[i] = False
        return output

    driver.runner.launch = launch_with_nan_behind_end  # type: ignore[method-assign]
    driver.submit(request(max_tokens=12, stop_token_ids=(end,)))
    driver.run()
    assert any(not all(lane.finite) for output in driver.outputs for lane in output.lanes)
    finish = driver.results["a", 0].finish
    assert finish and finish.reason == "stop"


def test_prompt_lookup_finds_the_longest_and_then_the_last() -> None:
    lookup = PromptLookup(3)
    assert lookup.propose(sequence([1, 2, 3, 4, 9, 9, 2, 3, 4, 8, 8, 1, 2, 3, 4], 1)) == [9, 9, 2]
    assert lookup.propose(sequence([5, 6, 1, 5, 6, 2, 5, 6], 2)) == [2, 5, 6]
    assert lookup.propose(sequence([1, 2, 3, 4], 3)) == []
    assert lookup.propose(sequence([1], 4)) == []


def test_prompt_lookup_is_what_a_search_finds() -> None:
    draw = random.Random(0)
    for id in range(100):
        lookup = PromptLookup(4)
        tokens = [draw.randrange(4) for _ in range(3)]
        seq = sequence(tokens, id)
        for _ in range(30):
            seq.tokens += [draw.randrange(4) for _ in range(draw.randrange(1, 4))]
            assert lookup.propose(seq) == plain_lookup(seq.tokens, 4)


def plain_lookup(tokens: list[int], limit: int) -> list[int]:
    """Return the tokens that prompt lookup should find, by a plain search."""
    for length in (4, 3, 2):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return tokens[end : end + limit]
    return []


def test_a_step_that_is_not_compiled_yet_costs_as_much_as_the_larger_one_in_its_place() -> None:
    costs = Costs({(16, 0): 1.0, (16, 7): 3.0})
    assert costs.of(2, 0) == 1.0
    assert costs.of(2, 3) == costs.of(16, 7) == 3.0
    smaller = Costs({**costs.seconds, (4, 0): 0.5, (8, 3): 2.0})
    assert smaller.of(2, 0) == 0.5 and smaller.of(5, 0) == 1.0
    assert smaller.of(2, 1) == smaller.of(8, 3) == 2.0
    assert smaller.of(9, 3) == smaller.of(2, 7) == 3.0
