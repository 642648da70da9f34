"""A schema as a whole: its draft, where its references lead, and how much work it has taken."""

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.structure.schemas.errors import SchemaError
from jaxserve.structure.schemas.walk import at_path, is_path

MOST_STEPS: Final = 40_000  # of about 20 us each
# Identifiers of the drafts in which $ref hides what stands beside it, and items may be a list.
BEFORE_2019: Final = ("draft-04", "draft-05", "draft-06", "draft-07")


class Document:
    """A whole schema, for what reads and rewrites its parts."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0
        name = root.get("$schema") if isinstance(root, Mapping) else None
        self._dialect = name if isinstance(name, str) else ""

    @property
    def ref_stands_alone(self) -> bool:
        """Return whether what stands beside a $ref says nothing, as until draft 7."""
        return any(draft in self._dialect for draft in BEFORE_2019)

    @property
    def has_item_lists(self) -> bool:
        """Return whether `items` may be a list, and prefixItems is unknown, as until 2019-09."""
        return self.ref_stands_alone or "2019-09" in self._dialect

    def target(self, path: str, reference: Any) -> Any:
        """Return the schema that a reference leads to.

        Raises SchemaError where it is none that is found in this schema by a path.
        """
        if not isinstance(reference, str) or not is_path(reference):
            raise SchemaError(path, f"is {reference!r:.80}; it must be a path in this schema")
        target = at_path(self._root, reference)
        if not isinstance(target, Mapping | bool):
            raise SchemaError(path, f"is {reference!r:.80}; no schema is there")
        return target

    def count(self, path: str) -> None:
        """Count one step of work; raise SchemaError where they are too many."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise SchemaError(
                path, f"takes more than {MOST_STEPS} steps to write without 'not' and 'oneOf'"
            )
