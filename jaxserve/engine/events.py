"""Events that an engine reports about its requests: new tokens, their scores, and the end."""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token, and of the most probable alternatives to it.

    Log-probabilities are natural logarithms under the model's own distribution, before temperature,
    penalties and masks. `top` holds (token id, log-probability), the most probable first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class FinishReason(StrEnum):
    """How a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended.

    `stopped_by` is the id of the token that ended the choice, None if no token did. `error` is set
    if the reason is ERROR.
    """

    reason: FinishReason
    stopped_by: int | None = None
    error: Exception | None = None


@dataclass(slots=True)
class Times:
    """Points in time and counts of one choice.

    The first four fields are monotonic seconds; each is 0 until the choice gets there. `cached`
    counts prompt tokens that were found in the prefix cache when the choice was first admitted.
    `verifications` counts steps that verified drafted tokens of the choice, `drafted` those tokens,
    and `accepted` the drafted tokens that the model would have chosen as well.
    """

    submitted: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    cached: int = 0
    preemptions: int = 0
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class TokenEvent:
    """New tokens of one choice, and, in its last event, how it ended."""

    request_id: str
    index: int  # of the choice within its request
    tokens: list[int]
    logprobs: list[Logprob] | None = None  # like tokens; None if the request asked for none
    prompt_logprobs: list[Logprob] | None = None
    embedding: list[float] | None = None  # of the prompt, in the last event
    finish: Finish | None = None  # in the last event
    times: Times | None = None  # in the event with the first token, and in the last one
