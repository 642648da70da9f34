"""Ranges of numbers of which the grammar library allows an end that is excluded, and their steps.

llguidance 1.9.1 takes 0 for {"exclusiveMinimum": 0, "maximum": 0.5}: where both ends have the same
integer before the point, it writes them as one, with nothing behind it allowed too.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

from jaxserve.structure.schemas.check import LARGE_MULTIPLE, has_large_multiple
from jaxserve.structure.schemas.conjunction import Conjunction
from jaxserve.structure.schemas.document import Document
from jaxserve.structure.schemas.errors import SchemaError
from jaxserve.structure.schemas.kinds import FRACTION
from jaxserve.structure.schemas.walk import schemas

ABOVE: Final = "exclusiveMinimum"
BELOW: Final = "exclusiveMaximum"
DEEPEST: Final = 6  # options inside of options, each of which has bounds
STEP: Final = "multipleOf"
BOUNDS: Final = frozenset((ABOVE, BELOW, STEP, "minimum", "maximum"))


def check_ranges(root: Any) -> None:
    """Raise SchemaError for ranges and steps that the library would follow wrongly.

    Schemas of one property or item that hold together are taken together, as the library does.
    """
    found = [schema for _, schema in schemas(root)]
    has_steps = sum(STEP in schema for schema in found) > 1
    if not has_steps and not any(map(_excludes_an_integer, found)):
        return
    document = Document(root)
    for path, schema in schemas(root):
        _check_cases(document, path, schema, 0)


def _excludes_an_integer(schema: Mapping[str, Any]) -> bool:
    return any(isinstance(schema.get(key), int) for key in (ABOVE, BELOW))


def _check_cases(document: Document, path: str, schema: Any, depth: int) -> None:
    """Check a schema, and what each combination of its options that have bounds makes of it."""
    document.count(path)
    conjunction = Conjunction(document, schema)
    if FRACTION in conjunction.kinds:
        _check(path, conjunction)
    if has_large_multiple(conjunction.steps):
        raise SchemaError(path, LARGE_MULTIPLE)
    if depth == DEEPEST:
        return
    for case in conjunction.cases(BOUNDS):
        _check_cases(document, path, case, depth + 1)
    for child in conjunction.shared_children():
        _check_cases(document, path, child, depth + 1)


def _check(path: str, conjunction: Conjunction) -> None:
    above = conjunction.strongest(ABOVE, max)
    below = conjunction.strongest(BELOW, min)
    least, most = conjunction.numbers
    # Where an excluded end holds, `numbers` begins or ends at the float next to it.
    begins = above is not None and least == math.nextafter(above, math.inf)
    ends = below is not None and most == math.nextafter(below, -math.inf)
    lower = above if begins else least
    upper = below if ends else most
    if lower is None or upper is None or lower >= upper:
        return
    if begins and isinstance(above, int) and above >= 0 and upper < above + 1:
        raise _refused(path, above, upper)
    if ends and isinstance(below, int) and below <= 0 and lower > below - 1:
        raise _refused(path, below, lower)


def _refused(path: str, excluded: float, other: float) -> SchemaError:
    problem = "a range shorter than 1 cannot exclude an integer at its end"
    way_out = "allow it, or let the range begin a little behind it"
    return SchemaError(path, f"excludes {excluded} and ends at {other:g}: {problem}; {way_out}")
