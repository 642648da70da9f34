"""How many drafts to verify, by simulated costs of steps; and what prompt lookup drafts."""

import random

import pytest

from jaxserve.engine.buckets import drafts_of
from jaxserve.engine.prompt_lookup import PromptLookup
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.speculation import LONGEST_PAUSE, Costs, Speculation, expected, most_tokens_per_second
from jaxserve.request import Request, SamplingParams

ROWS = (1, 2, 4, 8, 16)
DRAFTS = (0, *drafts_of(7))


def costs(base: float, per_token: float) -> Costs:
    return Costs({(rows, k): base + per_token * rows * (1 + k) for rows in ROWS for k in DRAFTS})


def sequence(tokens: list[int], id: int = 1) -> Sequence:
    request = Request(id=str(id), prompt=tuple(tokens), params=SamplingParams())
    return Sequence(id, request, 0, 0, 100, tokens=list(tokens))


def test_expected_tokens_are_a_geometric_series() -> None:
    for chance in (0.0, 0.3, 0.99, 1.0):
        for drafts in range(9):
            assert expected(chance, drafts) == pytest.approx(sum(chance**i for i in range(drafts + 1)))


@pytest.mark.parametrize("seed", range(200))
def test_never_slower_than_without(seed: int) -> None:
    """Whatever the costs and the chances, by their own account."""
    draw = random.Random(seed)
    table = Costs({(rows, k): draw.uniform(0.1, 10) for rows in ROWS for k in DRAFTS})
    drafted = [(draw.random(), draw.randrange(1, 8)) for _ in range(draw.randrange(1, 10))]
    plain = draw.randrange(6)
    rows = plain + len(drafted)
    chosen = most_tokens_per_second(table, rows, plain, drafted)
    tokens = plain + sum(expected(chance, min(count, chosen)) for chance, count in drafted)
    assert tokens / table.of(rows, chosen) >= (plain + len(drafted)) / table.of(rows, 0)


def test_a_chip_that_is_busy_verifies_nothing_and_one_that_waits_for_memory_all() -> None:
    drafted = [(0.8, 7)] * 8
    assert most_tokens_per_second(costs(0, 1), 8, 0, drafted) == 0
    assert most_tokens_per_second(costs(1, 0), 8, 0, drafted) == 7
    assert most_tokens_per_second(costs(1, 0.04), 8, 0, drafted) in (1, 3)
    assert most_tokens_per_second(costs(1, 0), 8, 0, [(0.0, 7)] * 8) == 0, "of equals the fewest"


def test_costs_of_rows_between_the_compiled_ones() -> None:
    table = costs(1, 1)
    assert table.of(3, 1) == table.seconds[4, 1] and table.of(99, 0) == table.seconds[16, 0]


class Always:
    waits = True
    has_pages = False

    def takes(self, request: Request) -> bool:
        return True

    def propose(self, seq: Sequence) -> list[int]:
        return [7, 7, 7]

    def forget(self, seq: Sequence) -> None:
        pass


def test_who_is_always_wrong_drafts_ever_more_rarely() -> None:
    """And whoever is right does not pause."""
    speculation = Speculation(Always(), 7, costs(1, 0.05))
    good, bad = sequence([1, 2], 1), sequence([1, 2], 2)
    drafted = {good.id: 0, bad.id: 0}
    for seq in (good, bad):
        speculation.enter(seq)
    for _ in range(400):
        for seq in (good, bad):
            seq.tokens.append(7)
        speculation.wake([good, bad])
        for seq in (good, bad):
            if seq.waits_for_host and (tokens := speculation.draft([seq], 1, 0).get(seq.id)):
                drafted[seq.id] += 1
                speculation.learn(seq, len(tokens), len(tokens) if seq is good else 0)
    assert drafted[good.id] > 390
    assert drafted[bad.id] < 60
    assert drafted[bad.id] >= 400 // LONGEST_PAUSE, "it tries again"


def test_prompt_lookup_finds_the_longest_and_then_the_last() -> None:
    lookup = PromptLookup(3)
    assert lookup.propose(sequence([1, 2, 3, 4, 9, 9, 2, 3, 4, 8, 8, 1, 2, 3, 4], 1)) == [9, 9, 2]
    assert lookup.propose(sequence([5, 6, 1, 5, 6, 2, 5, 6], 2)) == [2, 5, 6]
    assert lookup.propose(sequence([1, 2, 3, 4], 3)) == []
    assert lookup.propose(sequence([1], 4)) == []


def test_prompt_lookup_is_what_a_search_finds() -> None:
    draw = random.Random(0)
    for id in range(100):
        lookup, tokens = PromptLookup(4), [draw.randrange(4) for _ in range(3)]
        seq = sequence(tokens, id)
        for _ in range(30):
            seq.tokens += [draw.randrange(4) for _ in range(draw.randrange(1, 4))]
            assert lookup.propose(seq) == search(seq.tokens, 4)


def search(tokens: list[int], most: int) -> list[int]:
    for length in (4, 3, 2):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return tokens[end : end + most]
    return []
