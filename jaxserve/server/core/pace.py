"""Pace of the engine under its present load, learnt from what it hands out."""

from collections import deque
from statistics import median

WEIGHT = 0.1  # of the newest value in a running mean
NEWEST = 64  # values of a steady mean
SOME = 8  # values from which on the largest is left out
# Factor by which each value raises what is known of the fastest: one good moment is forgotten in
# thousands of values, a machine that has become slower is learnt in the end.
RISE = 1.0002
# Of answers, whose pace is compared with that of their first token.
ANSWERS = 64  # newest that count
FEWEST_ANSWERS = 8  # from which on something is known
FEWEST_TOKENS = 8  # behind its first token, without which an answer says little
IN_TIME = 0.9  # share of answers that are to be no slower than expected
MOST_SLOWNESS = 2.0


class RunningMean:
    """Running mean in which older values count less; the first value counts alone."""

    def __init__(self, value: float = 0.0):
        self.value = value
        self._is_empty = not value

    def add(self, value: float) -> None:
        """Take in a value."""
        weight = 1.0 if self._is_empty else WEIGHT
        self.value += (value - self.value) * weight
        self._is_empty = False


class SteadyMean:
    """Mean of the newest values without the largest, which may be a stall of the machine.

    A median would leave out steps with prompts, which are few and take longer than the others.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self._values: deque[float] = deque(maxlen=NEWEST)

    def add(self, value: float) -> None:
        """Take in a value."""
        self._values.append(value)
        if len(self._values) < SOME:
            self.value = median(self._values)
        else:
            self.value = (sum(self._values) - max(self._values)) / (len(self._values) - 1)


class Slowness:
    """Learns how much slower answers turn out than the pace that was known when they began.

    Attributes:
        value: Factor that nine of ten answers do not exceed, 1 to MOST_SLOWNESS.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self._factors: deque[float] = deque(maxlen=ANSWERS)

    def add(self, factor: float) -> None:
        """Take in how much longer the tokens of an answer took than expected."""
        self._factors.append(factor)
        if len(self._factors) >= FEWEST_ANSWERS:
            slow = sorted(self._factors)[int(IN_TIME * len(self._factors))]
            self.value = min(max(slow, 1.0), MOST_SLOWNESS)


class Pace:
    """Learns how long tokens and prompts take. Lives on the event loop; times are in seconds.

    Attributes:
        seconds_per_token: Time of each token of a choice that has one; 0 until it is known.
        slowness: What is known of answers that turn out slower.
    """

    def __init__(self, step_tokens: int):
        self.seconds_per_token = 0.0
        self.slowness = Slowness()
        self._step_tokens = step_tokens  # most tokens that a step computes in one lane
        self._tokens = SteadyMean()
        self._fastest_token = _Fastest()
        self._fastest_prompt_token = _Fastest()  # of prompts that fill half a step and more
        # Share of prompt tokens that the prefix cache did not have, 0 to 1.
        self._uncached_share = RunningMean(1.0)
        # Prompts that were computed while others waited behind them: tokens, and seconds.
        self._computed_tokens = RunningMean()
        self._computing_seconds = RunningMean()
        self._last_prompt_at: float | None = None  # None if none waited behind it

    # ---- what is learnt

    def observe_tokens(self, seconds: float, tokens: int) -> None:
        """Take in the time between two messages of a choice, the second of which has `tokens`."""
        self._tokens.add(seconds / tokens)
        self.seconds_per_token = self._tokens.value
        # The mean, not the value: a single fast step is no pace.
        self._fastest_token.add(self._tokens.value)

    def observe_prompt(self, tokens: int, cached: int, seconds: float) -> None:
        """Take in a prompt of `tokens` tokens, with the time from its row to its first token."""
        self._uncached_share.add((tokens - cached) / tokens)
        self._observe_prompt_time(tokens - cached, seconds)

    def observe_first_token(
        self, uncached: int, admitted: float, now: float, others_wait: bool
    ) -> None:
        """Take in that a prompt is computed, and whether others wait for their first token.

        Args:
            admitted: Time at which the prompt got its row.
        """
        if self._last_prompt_at is not None:
            # Not the time for which rows were missing, nor that of a server without requests.
            seconds = now - max(self._last_prompt_at, admitted)
            self._computed_tokens.add(uncached)
            self._computing_seconds.add(seconds)
            self._observe_prompt_time(uncached, seconds)
        self._last_prompt_at = now if others_wait else None

    def observe_answer(self, seconds: float, tokens: int, expected: float) -> None:
        """Take in an answer that has ended.

        Args:
            seconds: Time from its first token to its last.
            tokens: Number of tokens behind the first.
            expected: Seconds of each token, as known when its first came; 0 if nothing was.
        """
        if expected and tokens >= FEWEST_TOKENS:
            self.slowness.add(seconds / tokens / expected)

    def _observe_prompt_time(self, uncached: int, seconds: float) -> None:
        # Several short prompts are computed in one step, so that their times say little.
        if uncached >= self._step_tokens / 2:
            self._fastest_prompt_token.add(seconds / uncached)

    def forget_last_prompt(self) -> None:
        """Leave out the time until the next first token, in which something else was computed."""
        self._last_prompt_at = None

    # ---- what is expected

    def prompt_seconds(self, tokens: float) -> float:
        """Return how long a prompt takes once its first chunk is computed."""
        uncached = tokens * self._uncached_share.value
        return uncached * self._fastest_prompt_token.value + self.seconds_per_token

    def queue_seconds(self, prompt_tokens: float) -> float:
        """Return how long prompts that wait take together, given the tokens of all of them."""
        if not self._computed_tokens.value:
            return 0.0
        seconds = self._computing_seconds.value / self._computed_tokens.value
        return prompt_tokens * self._uncached_share.value * seconds

    def least_seconds(self, prompt_tokens: float, tokens: float) -> float:
        """Return the time for a prompt and its answer at the fastest that was ever seen."""
        prompt = prompt_tokens * self._uncached_share.value * self._fastest_prompt_token.value
        return prompt + tokens * self._fastest_token.value


class _Fastest:
    """Smallest of the values, or a little more where it was seen long ago; 0 without any."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, value: float) -> None:
        # What ended in the same step as something else took no time of its own.
        if value > 0:
            self.value = min(value, self.value * RISE) if self.value else value
