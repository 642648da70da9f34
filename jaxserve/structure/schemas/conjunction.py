"""Demands of one schema on a value, together with those that its allOf and $ref lead to.

Keywords that are not read here narrow a schema further: what is said of its values holds for more
values than follow it.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cached_property
from typing import Any, Final

from jaxserve.structure.schemas.document import Document
from jaxserve.structure.schemas.keywords import held
from jaxserve.structure.schemas.kinds import EVERY, Kinds, kind_of, kinds_named, value_key

DEEPEST: Final = 12  # levels of properties, items and options that are looked into
FOLLOWED: Final = ("$ref", "allOf")  # keywords whose schemas are parts of a conjunction
OPTIONS: Final = ("anyOf", "oneOf")
type Range = tuple[float, float]  # least and largest value, both allowed


def kinds_of(document: Document, schema: Any, depth: int = 0) -> Kinds:
    """Return the kinds of values that a schema allows, or more of them where that is not clear."""
    return Conjunction(document, schema, depth).kinds


class Conjunction:
    """Demands of a schema on a value, together with those that its allOf and $ref lead to."""

    def __init__(self, document: Document, schema: Any, depth: int = 0) -> None:
        self._document = document
        self._depth = depth
        self.is_false = False
        self.parts: list[Mapping[str, Any]] = []
        seen = set[int]()
        waiting = [schema]
        while waiting:
            part = waiting.pop()
            if part is False:
                self.is_false = True
            if not isinstance(part, Mapping) or id(part) in seen:
                continue
            seen.add(id(part))
            if "$ref" in part:
                waiting.append(document.found(part["$ref"]))
                if document.ref_stands_alone:
                    continue
            self.parts.append({key: value for key, value in part.items() if key not in FOLLOWED})
            waiting += _list(part.get("allOf"))

    @cached_property
    def kinds(self) -> Kinds:
        if self.is_false:
            return frozenset()
        kinds = EVERY
        for part in self.parts:
            kinds &= kinds_named(part.get("type"))
            if self._depth < DEEPEST:
                for options in _options(part).values():
                    kinds &= self._kinds_of_options(options)
        if self.values is not None:
            kinds &= {kind_of(value) for value in self.values.values()}
        return kinds

    def _kinds_of_options(self, options: Sequence[Any]) -> Kinds:
        return frozenset[str]().union(
            *(kinds_of(self._document, option, self._depth + 1) for option in options)
        )

    @cached_property
    def constants(self) -> dict[str, Any] | None:
        """The values that const and enum list, by their keys; None without const and enum."""
        left: dict[str, Any] | None = None
        for part in self.parts:
            for values in _values_listed(part):
                named = {value_key(value): value for value in values}
                left = named if left is None else {k: v for k, v in left.items() if k in named}
        return left

    @cached_property
    def values(self) -> dict[str, Any] | None:
        """The constants that are not excluded, by their keys; None without const and enum."""
        if self.constants is None:
            return None
        return {key: v for key, v in self.constants.items() if not self._is_excluded(v)}

    def _is_excluded(self, value: Any) -> bool:
        return isinstance(value, str) and value in self._texts_excluded

    @property
    def only_names(self) -> list[str] | None:
        """The names that the properties of an object have at most; None where others may come."""
        for part in self.parts:
            if part.get("additionalProperties") is False and "patternProperties" not in part:
                return list(part.get("properties", ()))
        return None

    @property
    def is_of_constants(self) -> bool:
        """Return whether nothing but const and enum, and the type, says which values follow."""
        keys = {key for part in self.parts for key in part}
        return keys <= {"const", "enum", "type", "title", "description"}

    def excludes(self, value: Any) -> bool:
        """Return whether a value certainly does not follow the schema."""
        if kind_of(value) not in self.kinds:
            return True
        if self.values is not None and value_key(value) not in self.values:
            return True
        if isinstance(value, str):
            least, most = self.sizes("Length")
            return not least <= len(value) <= most or self._is_excluded(value)
        if _is_number(value):
            least, most = self.numbers
            return not least <= value <= most
        return False

    @cached_property
    def _texts_excluded(self) -> set[str]:
        """The texts that {"not": {"enum": texts}} excludes, as complements of constants have it."""
        texts = set[str]()
        for part in self.parts:
            if isinstance(inner := part.get("not"), Mapping) and inner.keys() == {"enum"}:
                texts.update(text for text in _list(inner["enum"]) if isinstance(text, str))
        return texts

    @cached_property
    def numbers(self) -> Range:
        """The range of numbers; a bound that is itself excluded is moved to the next float."""
        lower = [end for end in [self.strongest("minimum", max)] if end is not None]
        upper = [end for end in [self.strongest("maximum", min)] if end is not None]
        if (above := self.strongest("exclusiveMinimum", max)) is not None:
            lower.append(math.nextafter(above, math.inf))
        if (below := self.strongest("exclusiveMaximum", min)) is not None:
            upper.append(math.nextafter(below, -math.inf))
        return max(lower, default=-math.inf), min(upper, default=math.inf)

    def strongest(self, key: str, of: Callable[[list[float]], float]) -> float | None:
        """Return the bound of a keyword that holds, the least or greatest one; None without any."""
        bounds = [part[key] for part in self.parts if _is_number(part.get(key))]
        return of(bounds) if bounds else None

    @property
    def steps(self) -> set[Decimal]:
        """The different values of multipleOf, as they are written."""
        given = [part["multipleOf"] for part in self.parts if _is_number(part.get("multipleOf"))]
        return {abs(Decimal(repr(step))) for step in given if step}

    def sizes(self, what: str) -> Range:
        """Return the range of minLength and maxLength, of `Items` or of `Properties`."""
        return self.strongest(f"min{what}", max) or 0, self._most(f"max{what}")

    def _most(self, key: str) -> float:
        most = self.strongest(key, min)
        return math.inf if most is None else most

    @cached_property
    def required(self) -> list[str]:
        names = dict[str, None]()
        for part in self.parts:
            names.update((name, None) for name in _list(part.get("required")))
        return list(names)

    def of_property(self, name: str) -> Mapping[str, Any]:
        """Return the schema that the value of a property follows, as far as its parts say."""
        return {"allOf": list(self._of_property(name))}

    def _of_property(self, name: str) -> Iterator[Any]:
        for part in self.parts:
            named = part.get("properties")
            if isinstance(named, Mapping) and name in named:
                yield named[name]
            elif "patternProperties" not in part and "additionalProperties" in part:
                yield part["additionalProperties"]

    @property
    def most_items_listed(self) -> int:
        return max([len(items_of(self._document, part)[0]) for part in self.parts], default=0)

    def of_item(self, index: int) -> Mapping[str, Any]:
        """Return the schema that an item follows, as far as its parts say."""
        return {"allOf": list(self._of_item(index))}

    def _of_item(self, index: int) -> Iterator[Any]:
        for part in self.parts:
            listed, rest = items_of(self._document, part)
            yield listed[index] if index < len(listed) else rest

    def shared_children(self) -> Iterator[Mapping[str, Any]]:
        """Yield the schema of each property and item of which several parts say something."""
        names = [name for part in self.parts for name in part.get("properties", ())]
        for name in dict.fromkeys(names):
            child = self.of_property(name)
            if len(child["allOf"]) > 1:
                yield child
        if sum("items" in part or "prefixItems" in part for part in self.parts) > 1:
            yield from (self.of_item(i) for i in range(self.most_items_listed + 1))

    def cases(self, about: Collection[str] = ()) -> list[Mapping[str, Any]]:
        """Return schemas whose union this is: one for each option of its first anyOf or oneOf.

        A oneOf is taken as an anyOf, which allows more. None are returned where there is neither.

        Args:
            about: Keywords; options of which none has one of them are passed over.
        """
        for part in self.parts:
            for key, options in _options(part).items():
                if about and not any(self._says_one_of(about, option) for option in options):
                    continue
                rest = [other for other in self.parts if other is not part]
                rest.append({name: value for name, value in part.items() if name != key})
                return [{"allOf": [option, *rest]} for option in options]
        return []

    def _says_one_of(self, keywords: Collection[str], schema: Any) -> bool:
        """Return whether a schema, or one that it holds or refers to, has one of the keywords."""
        if self._depth == DEEPEST:
            return False
        inner = Conjunction(self._document, schema, self._depth + 1)
        return any(
            not part.keys().isdisjoint(keywords)
            or any(inner._says_one_of(keywords, below) for _, below in held(part))
            for part in inner.parts
        )


def items_of(document: Document, schema: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    """Return the schemas of the first items, and that of the rest."""
    items = schema.get("items", True)
    if isinstance(items, list):
        return items, schema.get("additionalItems", True)
    if document.has_item_lists:
        return (), items
    return _list(schema.get("prefixItems")), items


def _options(part: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {key: part[key] for key in OPTIONS if isinstance(part.get(key), list)}


def _values_listed(part: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    if "const" in part:
        yield [part["const"]]
    if isinstance(part.get("enum"), list):
        yield part["enum"]


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
