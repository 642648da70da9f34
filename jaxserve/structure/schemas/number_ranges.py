"""Ranges of numbers of which the grammar library allows an end that is excluded.

llguidance 1.9.1 takes 0 for {"exclusiveMinimum": 0, "maximum": 0.5}: where both ends have the same
integer before the point, it writes them as one, with nothing behind it allowed too.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from jaxserve.structure.schemas.conjunction import Conjunction
from jaxserve.structure.schemas.document import Document
from jaxserve.structure.schemas.errors import SchemaError
from jaxserve.structure.schemas.kinds import FRACTION
from jaxserve.structure.schemas.walk import schemas

ABOVE: Final = "exclusiveMinimum"
BELOW: Final = "exclusiveMaximum"
DEEPEST: Final = 6  # options inside of options, each of which has bounds
BOUNDS: Final = frozenset((ABOVE, BELOW, "minimum", "maximum"))


def check_ranges(root: Any) -> None:
    """Raise SchemaError for a range whose excluded end the library would allow."""
    if not any(_excludes_an_integer(schema) for _, schema in schemas(root)):
        return
    document = Document(root)
    for path, schema in schemas(root):
        for conjunction in _cases(document, path, schema):
            if FRACTION in conjunction.kinds:
                _check(path, conjunction)


def _excludes_an_integer(schema: Mapping[str, Any]) -> bool:
    return any(isinstance(schema.get(key), int) for key in (ABOVE, BELOW))


def _cases(document: Document, path: str, schema: Any) -> Iterator[Conjunction]:
    """Yield the schema, and what each combination of its options that have bounds makes of it."""
    waiting = [(schema, 0)]
    while waiting:
        document.count(path)
        case, depth = waiting.pop()
        conjunction = Conjunction(document, case)
        yield conjunction
        if depth < DEEPEST:
            waiting += [(inner, depth + 1) for inner in conjunction.cases(BOUNDS)]


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
