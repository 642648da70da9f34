"""A schema as a whole: its draft, where its references lead, and how much work it has taken."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from jaxserve.structure.schemas.errors import SchemaError
from jaxserve.structure.schemas.keywords import SINCE, UNTIL
from jaxserve.structure.schemas.walk import at_path, is_path

MOST_STEPS: Final = 20_000  # a second of work, or two of a slow machine
DRAFTS: Final[Mapping[str, int]] = MappingProxyType(
    {"draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019}
)
NEWEST: Final = 2020


class Document:
    """A whole schema, for what reads and rewrites its parts."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0
        name = root.get("$schema") if isinstance(root, Mapping) else None
        named = [draft for part, draft in DRAFTS.items() if isinstance(name, str) and part in name]
        self._draft = named[0] if named else NEWEST

    @property
    def ref_stands_alone(self) -> bool:
        """Return whether what stands beside a $ref says nothing, as until draft 7."""
        return self._draft <= 7

    @property
    def has_item_lists(self) -> bool:
        """Return whether `items` may be a list, and prefixItems is unknown, as until 2019-09."""
        return self._draft <= 2019

    def knows(self, keyword: str) -> bool:
        """Return whether a keyword says something in the schema's draft."""
        return SINCE.get(keyword, 0) <= self._draft <= UNTIL.get(keyword, NEWEST)

    def target(self, path: str, reference: Any) -> Any:
        """Return the schema that a reference leads to.

        Raises SchemaError where it is none that is found in this schema by a path.
        """
        found = self.found(reference)
        if found is None:
            raise SchemaError(path, f"is {reference!r:.80}; no schema is there")
        return found

    def found(self, reference: Any) -> Any:
        """Return the schema that a reference leads to by a path; None where there is none."""
        if not isinstance(reference, str) or not is_path(reference):
            return None
        target = at_path(self._root, reference)
        return target if isinstance(target, Mapping | bool) else None

    def count(self, path: str = "") -> None:
        """Count one step of work; raise SchemaError where they are too many."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise SchemaError(
                path, f"takes more than {MOST_STEPS} steps to write without 'not' and 'oneOf'"
            )
