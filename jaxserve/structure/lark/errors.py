"""Error of a grammar that is malformed, or that no regular expression is equal to."""


class LarkError(ValueError):
    """A line of a grammar, from 1, and what is wrong there."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}")
