"""Usual length of answers, learnt from those that have ended."""

from bisect import bisect_left, bisect_right
from collections import deque
from itertools import groupby

KNOWN = 8  # answers after which their usual length is known
REMEMBERED = 64  # answers


class AnswerLengths:
    """Estimates how long an answer will be, by the product limit of Kaplan and Meier.

    An answer that ended by itself has its length. One that was cut, by max_tokens, by its deadline
    or by its client, would have been at least as long: it says nothing about the tokens beyond its
    end. Source: Kaplan and Meier, Nonparametric Estimation from Incomplete Observations, 1958.
    """

    def __init__(self) -> None:
        self._answers: deque[tuple[float, bool]] = deque(maxlen=REMEMBERED)
        self._lengths: list[float] = []  # at which answers ended by themselves, ascending
        self._surviving: list[float] = []  # share of the answers that are longer than each of these
        self._longest = 0.0  # of all that are remembered

    def add(self, tokens: float, cut: bool) -> None:
        """Take in an answer that has ended, with the tokens of one choice.

        Args:
            cut: Whether the answer would have gone on.
        """
        self._answers.append((tokens, cut))
        self._estimate()

    @property
    def known(self) -> bool:
        """True once enough answers have ended to say what is usual."""
        return len(self._answers) >= KNOWN

    def expected(self, max_tokens: float, so_far: float = 0.0) -> float:
        """Return the median of the tokens of answers that have `so_far` of them and more.

        Where most of those that are remembered were cut, it is as long as the longest of them; one
        that is longer already is taken to go on for half as long again.
        """
        place = bisect_right(self._lengths, so_far)
        share = self._surviving[place - 1] if place else 1.0
        # The first length at which no more than half of the share is left.
        half = bisect_left(self._surviving, -share / 2, place, key=lambda left: -left)
        if half < len(self._lengths):
            length = self._lengths[half]
        elif so_far < self._longest:
            length = self._longest
        else:
            length = 1.5 * so_far
        return min(length, max_tokens)

    def shortest(self, max_tokens: float) -> float:
        """Return the tokens of the shortest answer that ended by itself.

        Where none of those that are remembered did, the longest of them counts.
        """
        return min(self._lengths[0] if self._lengths else self._longest, max_tokens)

    def _estimate(self) -> None:
        """Compute the shares anew."""
        ordered = sorted(self._answers)
        self._longest = ordered[-1][0]
        self._lengths = []
        self._surviving = []
        share = 1.0
        at_risk = len(ordered)
        for length, group in groupby(ordered, key=lambda answer: answer[0]):
            cut = [each_cut for _, each_cut in group]
            if ended := cut.count(False):
                share *= 1 - ended / at_risk
                self._lengths.append(length)
                self._surviving.append(share)
            at_risk -= len(cut)
