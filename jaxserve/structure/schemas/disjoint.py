"""Schemas that exclude each other, as their keywords say; others are taken as overlapping."""

from collections.abc import Sequence
from typing import Any

from jaxserve.structure.schemas.conjunction import DEEPEST, Conjunction, Range
from jaxserve.structure.schemas.document import Document
from jaxserve.structure.schemas.kinds import NUMBERS, kind_of


def all_disjoint(document: Document, schemas: Sequence[Any]) -> bool:
    """Return whether constants alone show that no value follows two of these schemas.

    They may be constants, or objects with one in a property that all of them require. It takes one
    pass over the schemas, however many they are.
    """
    read = [Conjunction(document, schema) for schema in schemas]
    if not read or any(conjunction.is_false for conjunction in read):
        return False
    if _have_values_apart(read):
        return True
    return any(
        _have_values_apart([Conjunction(document, one.of_property(name)) for one in read])
        for name in read[0].required
        if all(one.kinds <= {"object"} and name in one.required for one in read)
    )


def _have_values_apart(read: Sequence[Conjunction]) -> bool:
    seen = set[str]()
    for conjunction in read:
        if conjunction.values is None:
            return False
        keys = conjunction.values.keys()
        if seen & keys:
            return False
        seen |= keys
    return True


def disjoint(document: Document, first: Any, second: Any, depth: int = 0) -> bool:
    """Return whether no value follows both schemas; False where that is not clear."""
    document.count("")
    if depth > DEEPEST:
        return False
    one, other = (Conjunction(document, schema, depth) for schema in (first, second))
    if one.is_false or other.is_false:
        return True
    common = one.kinds & other.kinds
    if all(_apart(document, one, other, kind, depth) for kind in common):
        return True
    if cases := one.cases():
        return all(disjoint(document, case, second, depth + 1) for case in cases)
    if cases := other.cases():
        return all(disjoint(document, first, case, depth + 1) for case in cases)
    return False


def _apart(document: Document, one: Conjunction, other: Conjunction, kind: str, depth: int) -> bool:
    """Return whether no value of one kind follows both."""
    if _values_apart(one, other, kind):
        return True
    if kind in NUMBERS:
        return _ranges_apart(one.numbers, other.numbers)
    match kind:
        case "string":
            return _ranges_apart(one.sizes("Length"), other.sizes("Length"))
        case "array":
            return _arrays_apart(document, one, other, depth)
        case "object":
            return _objects_apart(document, one, other, depth)
    return False


def _values_apart(one: Conjunction, other: Conjunction, kind: str) -> bool:
    for values, against in ((one.values, other), (other.values, one)):
        if values is not None:
            of_kind = [value for value in values.values() if kind_of(value) == kind]
            if all(against.excludes(value) for value in of_kind):
                return True
    return False


def _ranges_apart(one: Range, other: Range) -> bool:
    return max(one[0], other[0]) > min(one[1], other[1])


def _arrays_apart(document: Document, one: Conjunction, other: Conjunction, depth: int) -> bool:
    one_sizes = one.sizes("Items")
    other_sizes = other.sizes("Items")
    if _ranges_apart(one_sizes, other_sizes):
        return True
    present = int(max(one_sizes[0], other_sizes[0]))
    listed = max(one.most_items_listed, other.most_items_listed) + 1
    return any(
        disjoint(document, one.of_item(i), other.of_item(i), depth + 1)
        for i in range(min(present, listed))
    )


def _objects_apart(document: Document, one: Conjunction, other: Conjunction, depth: int) -> bool:
    required = [*one.required, *(name for name in other.required if name not in one.required)]
    most = min(one.sizes("Properties")[1], other.sizes("Properties")[1])
    least = max(one.sizes("Properties")[0], other.sizes("Properties")[0], len(required))
    return least > most or any(
        disjoint(document, one.of_property(name), other.of_property(name), depth + 1)
        for name in required
    )
