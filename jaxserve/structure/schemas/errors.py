"""Error of a schema that cannot be followed."""


class SchemaError(ValueError):
    """A place in a schema, and why it cannot be followed."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path or '/'} {problem}")
