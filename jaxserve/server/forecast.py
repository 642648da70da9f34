"""When will a request have its first token? An optimistic answer: what it refuses had no chance."""

from dataclasses import dataclass

WEIGHT = 0.1  # of the newest observation


@dataclass
class Forecast:
    """step_tokens: the most tokens that a step computes over all lanes. The rest are running means."""

    step_tokens: int
    step_seconds: float = 0.0
    uncached: float = 1.0  # share of prompt tokens that the prefix cache did not have

    def saw_step(self, seconds: float) -> None:
        self.step_seconds += (seconds - self.step_seconds) * (WEIGHT if self.step_seconds else 1.0)

    def saw_prompt(self, tokens: int, cached: int) -> None:
        self.uncached += ((tokens - cached) / tokens - self.uncached) * WEIGHT

    def seconds_to_first_token(self, tokens_ahead: int, tokens: int) -> float:
        """As if every step were full of prompts; 0 before the first step was seen."""
        steps = (tokens_ahead + tokens) * self.uncached / self.step_tokens
        return max(steps, 1.0) * self.step_seconds
