"""When will a request have its first token? An optimistic answer: what it refuses had no chance."""

from dataclasses import dataclass

RISE = 1.05  # at most, from one step to the next
WEIGHT = 0.1  # of the newest prompt


@dataclass
class TTFTEstimate:
    """step_tokens: the most tokens that a step computes over all lanes. The rest is learnt."""

    step_tokens: int
    step_seconds: float = 0.0  # of a fast step: a slow one hardly counts, many of them do
    uncached: float = (
        1.0  # share of prompt tokens that the prefix cache did not have, a running mean
    )

    def observe_step(self, seconds: float) -> None:
        """Of a step whose output was read."""
        self.step_seconds = min(seconds, self.step_seconds * RISE) if self.step_seconds else seconds

    def observe_prompt(self, tokens: int, cached: int) -> None:
        self.uncached += ((tokens - cached) / tokens - self.uncached) * WEIGHT

    def seconds_to_first_token(self, tokens_ahead: int, tokens: int) -> float:
        """As if every step were full of prompts; 0 with nothing ahead, whose steps are few and may
        be fast.
        """
        if not tokens_ahead:
            return 0.0
        return (tokens_ahead + tokens) * self.uncached / self.step_tokens * self.step_seconds
