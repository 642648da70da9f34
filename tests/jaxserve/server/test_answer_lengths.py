"""The usual length of answers, against a published survival curve."""

import pytest

from jaxserve.server.core.answer_lengths import KNOWN, AnswerLengths

# Weeks of remission of 21 patients on 6-mercaptopurine; True: still in remission when last seen.
# Freireich et al., Blood 21 (1963) 699; Kaplan and Meier's estimate of it is in every textbook.
FREIREICH = [
    *[(6, False)] * 3,
    (6, True),
    *((7, False), (9, True), (10, False), (10, True), (11, True), (13, False), (16, False)),
    *((17, True), (19, True), (20, True), (22, False), (23, False), (25, True)),
    *((32, True), (32, True), (34, True), (35, True)),
]
SURVIVAL = {6: 0.857, 7: 0.807, 10: 0.753, 13: 0.690, 16: 0.627, 22: 0.538, 23: 0.448}


def lengths_of(answers: list[tuple[int, bool]]) -> AnswerLengths:
    lengths = AnswerLengths()
    for tokens, cut in answers:
        lengths.add(tokens, cut)
    return lengths


def test_the_published_curve() -> None:
    lengths = lengths_of(FREIREICH)
    found = dict(zip(lengths._lengths, lengths._surviving, strict=True))
    assert found == pytest.approx(SURVIVAL, abs=5e-4)
    assert lengths.expected(1000) == 23, "the published median"
    # Of those beyond 16 weeks, 0.627, half is never seen to end: the longest counts.
    assert lengths.expected(1000, so_far=16) == 35
    assert lengths.expected(20) == 20


def test_answers_that_were_all_cut_are_as_long_as_the_longest() -> None:
    lengths = lengths_of([(16, True), (64, True)] * KNOWN)
    assert lengths.expected(1000) == 64
    assert lengths.expected(40) == 40
    assert lengths.expected(1000, so_far=100) == 150


def test_a_client_that_always_asks_for_the_most_changes_nothing() -> None:
    """Answers that end by themselves say how long the others are."""
    lengths = lengths_of([(100, False)] * 20 + [(500, True)])
    assert lengths.expected(32_000) == 100
    assert lengths.expected(32_000, so_far=100) == 500


def test_nothing_is_known_at_first() -> None:
    lengths = lengths_of([(10, False)] * (KNOWN - 1))
    assert not lengths.known
    lengths.add(10, cut=False)
    assert lengths.known
