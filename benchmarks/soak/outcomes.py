"""Outcomes of the actions: how often each was done, and what was not as expected."""

from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field

from jaxserve.errors import JaxserveError

LONGEST_EXAMPLE = 400  # characters


class UnexpectedError(Exception):
    """An answer that is not the one that was expected.

    Args:
        kind: What it is counted as: a few words without ids and numbers that differ each time.
        text: What was answered.
    """

    def __init__(self, kind: str, text: str = ""):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass
class Outcomes:
    """Counts of a whole soak.

    Attributes:
        actions: How often each action was done.
        refused: Requests that failed on purpose.
        checked: Tool calls and texts of grammars that were whole, and were parsed.
        unexpected: How often each kind of unexpected answer came.
        examples: The first text of each kind.
    """

    actions: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    checked: Counter[str] = field(default_factory=Counter)
    unexpected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def note(self, action: str, error: Exception) -> None:
        """Count an error that an action did not expect."""
        match error:
            case UnexpectedError():
                kind = error.kind
            case JaxserveError():
                kind = f"{type(error).__name__} {error.code}"
            case _:
                kind = type(error).__name__
        key = f"{action}: {kind}"
        self.unexpected[key] += 1
        self.examples.setdefault(key, f"{error!r}"[:LONGEST_EXAMPLE])

    async def refusal(self, call: Awaitable[object], *codes: str) -> None:
        """Wait for a call of gRPC that has to end with one of these codes; "OK" allows an answer.

        Any other error is the caller's.
        """
        try:
            await call
        except JaxserveError as error:
            if error.code not in codes:
                raise
            self.refused += 1
        else:
            if "OK" not in codes:
                raise UnexpectedError("answered instead of refused")
