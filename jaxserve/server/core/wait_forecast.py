"""Forecast of when waiting requests get their rows and their first tokens."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat

from jaxserve.server.core.answer_lengths import AnswerLengths
from jaxserve.server.core.pace import Pace

FIRST_TOKENS = 512  # most of an answer, while the usual length is not known


@dataclass(frozen=True)
class Running:
    """Choices that keep the engine busy."""

    # Seconds of each choice that has a token, until its row is free; ascending.
    seconds_left: Sequence[float]
    beginning: int = 0  # choices that have a row and no token yet
    # Choices wait in the engine, so that a row that is free cannot be used, for lack of pages.
    engine_waits: bool = False
    # Of requests that have a token, by priority and client: choices that have one too and have not
    # ended, and choices without.
    held: Mapping[tuple[int, str], int] = field(default_factory=dict)
    unbegun_of: Mapping[tuple[int, str], int] = field(default_factory=dict)

    @cached_property
    def rows_of(self) -> Mapping[str, int]:
        """Choices of `held` by client."""
        rows = Counter[str]()
        for (_, client), held in self.held.items():
            rows[client] += held
        return rows


@dataclass(frozen=True, slots=True)
class Work:
    """Everything that is ahead of a request."""

    running: Running
    unbegun: int = 0  # choices without a token of requests that have one, if they go before it
    given_up: int = 0  # rows that others give up for the client of the request
    choices: float = 1.0  # of a waiting request, on average
    prompt_tokens: float = 0.0  # of a waiting request, on average; 0: no prompt is known yet
    max_tokens: float = 0.0  # of a waiting request, on average


@dataclass(frozen=True, slots=True)
class RowTimes:
    """Times at which rows come free, one after the other.

    Attributes:
        first: Seconds until each row comes free for the first time, ascending.
        round_seconds: Seconds for which a waiting choice has its row.
    """

    first: Sequence[float]
    round_seconds: float

    def seconds_to(self, number: int) -> float:
        """Return the seconds until a row has come free for the `number`-th time."""
        rounds, row = divmod(number - 1, len(self.first))
        return self.first[row] + rounds * self.round_seconds

    def seconds_to_prompt(self, number: int, prompt_seconds: float) -> float:
        """Return the seconds until the prompt of the `number`-th row has its turn.

        Prompts are computed one after the other, each once it has a row. From the row on that comes
        latest of all, there is no pause between them: rows that come free together leave the last
        of their prompts waiting for all others.

        Args:
            prompt_seconds: Seconds that each prompt takes.
        """
        rounds, row = divmod(number - 1, len(self.first))
        # Time of each row, less that of all prompts between the first one and its own.
        starts = [seconds - i * prompt_seconds for i, seconds in enumerate(self.first)]
        prompts = (number - 1) * prompt_seconds
        later_rounds = self.round_seconds - len(self.first) * prompt_seconds
        found = max(starts[: row + 1]) + rounds * later_rounds
        if rounds:  # of those before, the first or the last comes latest
            found = max(found, max(starts) + max(0.0, (rounds - 1) * later_rounds))
        return found + prompts


class WaitForecast:
    """Forecasts the times at which rows come free. Lives on the event loop.

    Args:
        rows: Number of choices that run together.
    """

    def __init__(self, rows: int, pace: Pace, lengths: AnswerLengths):
        self._pace = pace
        self._lengths = lengths
        self._rows = rows

    @property
    def knows_pace(self) -> bool:
        """True once the time that tokens take is known."""
        return self._pace.seconds_per_token > 0

    def seconds_of(self, max_tokens: float) -> float:
        """Return how long a choice has its row after its first token."""
        return self._expected(max_tokens, 0) * self._pace.seconds_per_token

    def seconds_left(self, max_tokens: float, so_far: int) -> float:
        """Return how long a choice that has `so_far` tokens still has its row."""
        return max(0.0, self._expected(max_tokens, so_far) - so_far) * self._pace.seconds_per_token

    def row_times(self, work: Work) -> RowTimes:
        """Return the times at which rows come free behind this work."""
        left = work.running.seconds_left
        round_seconds = self.seconds_of(work.max_tokens)
        if work.prompt_tokens:
            round_seconds += self._pace.prompt_seconds(work.prompt_tokens)
        given_up = min(work.given_up, len(left))
        free = self._free_rows(work) + given_up
        return RowTimes([*repeat(0.0, free), *left[given_up:]], round_seconds)

    def finds_free_row(self, choices: int, work: Work) -> bool:
        """Return whether the `choices`-th choice gets a row that is free already."""
        return choices + work.unbegun <= self._free_rows(work)

    def seconds_to_start(self, choices: int, prompt_tokens: int, work: Work) -> float:
        """Return the seconds until the `choices`-th choice gets a row, and its prompt its turn.

        While the usual length of answers is not known, rows are taken to come free at once.

        Args:
            prompt_tokens: Tokens of all prompts that are computed before.
        """
        prompts = self._pace.queue_seconds(prompt_tokens)
        if not self._lengths.known:
            return prompts
        number = choices + work.unbegun
        return self.row_times(work).seconds_to_prompt(number, prompts / number)

    def _free_rows(self, work: Work) -> int:
        left = work.running.seconds_left
        if work.running.engine_waits and left:
            return work.running.beginning
        return max(0, self._rows - len(left))

    def _expected(self, max_tokens: float, so_far: int) -> float:
        """Return the tokens of a choice, of a guessed number where too few answers have ended."""
        if self._lengths.known:
            return self._lengths.expected(max_tokens, so_far)
        return min(max_tokens, FIRST_TOKENS)
