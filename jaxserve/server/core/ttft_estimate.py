"""A lower bound of the time to first token (TTFT), learnt from the steps of the running engine."""

from dataclasses import dataclass

MAX_RISE = 1.05  # largest factor by which one step may raise the estimated duration of a step
WEIGHT = 0.1  # of the newest prompt in the running mean of uncached shares


@dataclass
class TTFTEstimate:
    """An optimistic estimate of when a new request gets its first token.

    The estimate refuses requests whose deadline cannot be met, so that it errs on the low side: a
    refused request had no chance.
    """

    step_tokens: int  # most tokens that a step computes, over all lanes
    step_seconds: float = 0.0  # duration of a fast step; 0 until the first step was seen
    # Running mean of the share of prompt tokens that the prefix cache did not have, 0 to 1.
    uncached_share: float = 1.0

    def observe_step(self, seconds: float) -> None:
        """Take in the duration of a step whose output was read."""
        if not self.step_seconds:
            self.step_seconds = seconds
            return
        # The limited rise lets a single slow step count little, and many of them count fully.
        self.step_seconds = min(seconds, self.step_seconds * MAX_RISE)

    def observe_prompt(self, tokens: int, cached: int) -> None:
        """Take in a prompt of `tokens` tokens, of which the prefix cache had `cached`."""
        uncached_share = (tokens - cached) / tokens
        self.uncached_share += (uncached_share - self.uncached_share) * WEIGHT

    def seconds_to_first_token(self, tokens_ahead: int, tokens: int) -> float:
        """Estimate the TTFT of a prompt of `tokens` tokens behind `tokens_ahead` waiting ones.

        Every step is taken to be full of prompt tokens. With nothing ahead the estimate is 0: the
        few steps of a single prompt may be faster than anything seen so far.
        """
        if not tokens_ahead:
            return 0.0
        steps = (tokens_ahead + tokens) * self.uncached_share / self.step_tokens
        return steps * self.step_seconds
