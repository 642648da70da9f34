"""Ranges of numbers of which the grammar library allows an end that is excluded.

llguidance 1.9.1 takes 0 for {"exclusiveMinimum": 0, "maximum": 0.5}: where both ends have the same
integer before the point, it writes them as one, with nothing behind it allowed too.
"""

import math
from collections.abc import Iterator
from typing import Any

from jaxserve.structure.schemas.conjunction import Conjunction
from jaxserve.structure.schemas.document import Document
from jaxserve.structure.schemas.errors import SchemaError
from jaxserve.structure.schemas.kinds import FRACTION
from jaxserve.structure.schemas.walk import schemas


def narrow_ranges(root: Any) -> None:
    """Raise SchemaError for a range whose excluded end the library would allow."""
    if not any(_excludes_an_integer(schema) for _, schema in schemas(root)):
        return
    document = Document(root)
    for path, schema in schemas(root):
        for conjunction in _cases(document, path, schema):
            if FRACTION in conjunction.kinds:
                _check(path, conjunction)


def _excludes_an_integer(schema: Any) -> bool:
    return any(isinstance(schema.get(key), int) for key in ("exclusiveMinimum", "exclusiveMaximum"))


def _cases(document: Document, path: str, schema: Any) -> Iterator[Conjunction]:
    """Yield the schema, and what each combination of its options makes of it."""
    waiting = [schema]
    while waiting:
        document.count(path)
        conjunction = Conjunction(document, waiting.pop())
        yield conjunction
        waiting += conjunction.cases()


def _check(path: str, conjunction: Conjunction) -> None:
    above = conjunction.strongest("exclusiveMinimum", max)
    below = conjunction.strongest("exclusiveMaximum", min)
    least, most = conjunction.numbers
    if least > most:
        return
    # Where an excluded end holds, `numbers` begins or ends at the float next to it.
    match above, below:
        case int(), _ if least == math.nextafter(above, math.inf) and 0 <= above > most - 1:
            raise _refused(path, above, most)
        case _, int() if most == math.nextafter(below, -math.inf) and 0 >= below < least + 1:
            raise _refused(path, below, least)


def _refused(path: str, excluded: float, other: float) -> SchemaError:
    problem = "a range shorter than 1 cannot exclude an integer at its end"
    way_out = "allow it, or let the range begin a little behind it"
    return SchemaError(path, f"excludes {excluded} and ends at {other:g}: {problem}; {way_out}")
