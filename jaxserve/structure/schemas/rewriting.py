"""Schemas written without the keywords that the grammar library does not know.

`not` becomes the complement of what it holds, `oneOf` a union whose branches exclude each other,
`if` a union of two cases, and dependent keywords unions of a property that is absent and of what
its presence demands. Definitions that are referred to move to `$defs`. What cannot be written so is
refused with its path.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from jaxserve.structure.schemas.combine import all_of, any_of
from jaxserve.structure.schemas.complement import (
    Place,
    opposites_of_keywords,
    other_kinds,
)
from jaxserve.structure.schemas.conjunction import kinds_of
from jaxserve.structure.schemas.disjoint import all_disjoint, disjoint
from jaxserve.structure.schemas.document import Document
from jaxserve.structure.schemas.errors import SchemaError
from jaxserve.structure.schemas.finish import LISTS, NAMED, PARTS, Finish
from jaxserve.structure.schemas.kinds import EVERY, Kinds, kinds_named
from jaxserve.structure.schemas.plain import plainly_written
from jaxserve.structure.schemas.walk import escaped, goes_by_names, schemas

DEPENDENT: Final = ("dependentRequired", "dependentSchemas", "dependencies")
# What is rewritten, with the keywords that say nothing without one of them.
REWRITTEN: Final = ("not", "oneOf", "if", "then", "else", *DEPENDENT)
UNKNOWN: Final = {
    "uniqueItems": "a grammar does not compare items",
    "contains": "a grammar does not count the items that follow a schema",
    "propertyNames": "only a list of names can be; use patternProperties for others",
    "unevaluatedItems": "beside keywords that evaluate items only 'items' can be",
    "unevaluatedProperties": "beside allOf, $ref and the like only additionalProperties can be",
    "$dynamicRef": "only $ref can be",
    "$recursiveRef": "only $ref can be",
}
SILENT: Final = ("minContains", "maxContains", "$dynamicAnchor", "$recursiveAnchor")
MOVED: Final = ("$defs", "definitions")


def rewritten(root: Any) -> Any:
    """Return a schema that the same values follow, in keywords that the library knows.

    A schema that has no others is returned as it is, and so is one whose references go by names
    ($id or $anchor inside): the library resolves these, and refuses what it does not know.

    Raises:
        SchemaError: A keyword cannot be followed; the text has its path.
    """
    if not _has_unknown(root) or goes_by_names(root):
        return root
    try:
        return _Rewriting(root).whole()
    except RecursionError:
        raise SchemaError("", "nests too deep") from None


def _has_unknown(root: Any) -> bool:
    """Return whether a keyword is in force that the library does not know."""
    return any(
        key in REWRITTEN or key in UNKNOWN or key in SILENT
        for _, schema in schemas(root)
        for key in schema
    )


class _Rewriting:
    """One schema on its way.

    In between, references keep their paths in the original, and {"not": {"enum": texts}} stands for
    the other texts, so that `disjoint` can read both; see finish.py.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._document = Document(root)
        self._finish = Finish()
        self._opened: list[str] = []  # references inside of which a complement is being written

    def whole(self) -> Any:
        root = self._finish.schema(self._followed("", self._root, EVERY))
        definitions = {}
        while reference := self._finish.next_reference():
            target = self._document.target(reference, reference)
            followed = self._followed(reference[1:], target, EVERY)
            definitions[self._finish.name(reference)] = self._finish.schema(followed)
        return {**root, "$defs": definitions} if definitions and root is not False else root

    # ---- schemas that are followed

    def _followed(self, path: str, schema: Any, kinds: Kinds) -> Any:
        """Return a schema as it is followed by values of these kinds; others do not get here."""
        self._document.count(path)
        if not isinstance(schema, Mapping):
            return schema
        kinds &= kinds_of(self._document, schema)
        if not kinds:
            return False
        schema = plainly_written(self._document, schema)
        own = {}
        demands = []
        for key, value in schema.items():
            place = f"{path}/{key}"
            if key in UNKNOWN:
                raise SchemaError(place, f"cannot be followed: {UNKNOWN[key]}")
            if key in LISTS and isinstance(value, list):
                parts = [self._followed(f"{place}/{i}", v, kinds) for i, v in enumerate(value)]
                demands += parts if key == "allOf" else [any_of(parts)]
            elif key in NAMED and isinstance(value, Mapping):
                own[key] = {
                    name: self._followed(f"{place}/{escaped(name)}", part, EVERY)
                    for name, part in value.items()
                }
            elif key in PARTS:
                own[key] = self._parts(place, value)
            elif key not in (*REWRITTEN, *UNKNOWN, *SILENT, *MOVED):
                own[key] = value
        demands += self._demands(path, schema, kinds)
        return self._joined(path, own, demands)

    def _joined(self, path: str, own: dict[str, Any], demands: list[Any]) -> Any:
        """Return a schema's own keywords with what it demands besides, in one schema.

        Its own come first, since properties are written in the order in which they are read.
        """
        joined = all_of(self._document, [own, *demands])
        if joined is False or not own:
            return joined
        if joined is own:
            return own
        rest = [part for part in joined["allOf"] if part is not own]
        return {**own, **rest[0]} if rest[0].keys() == {"anyOf"} else {**own, "allOf": rest}

    def _parts(self, path: str, value: Any) -> Any:
        if isinstance(value, list):
            return [self._followed(f"{path}/{i}", part, EVERY) for i, part in enumerate(value)]
        return self._followed(path, value, EVERY)

    def _demands(self, path: str, schema: Mapping[str, Any], kinds: Kinds) -> Iterator[Any]:
        """Yield what the keywords that are rewritten demand of a value."""
        if "not" in schema:
            yield self._opposite(f"{path}/not", schema["not"], kinds)
        if "oneOf" in schema:
            yield self._one_of(f"{path}/oneOf", _list(f"{path}/oneOf", schema["oneOf"]), kinds)
        if "if" in schema:
            yield self._if(path, schema, kinds)
        for key in DEPENDENT:
            for name, needs in _mapping(f"{path}/{key}", schema.get(key, {})).items():
                yield self._dependent(f"{path}/{key}/{escaped(name)}", name, needs)

    def _one_of(self, path: str, branches: list[Any], kinds: Kinds) -> Any:
        """Return the union of branches, each without those that it may hold together with."""
        followed = [self._followed(f"{path}/{i}", part, kinds) for i, part in enumerate(branches)]
        if all_disjoint(self._document, branches):
            return any_of(followed)
        return any_of(self._alone(path, branches, followed, i, kinds) for i in range(len(branches)))

    def _alone(
        self, path: str, branches: list[Any], followed: list[Any], i: int, kinds: Kinds
    ) -> Any:
        """Return a branch without the values that follow another one too."""
        own_kinds = kinds & kinds_of(self._document, branches[i])
        others = [
            self._opposite(f"{path}/{j}", other, own_kinds)
            for j, other in enumerate(branches)
            if j != i and not disjoint(self._document, branches[i], other)
        ]
        return all_of(self._document, [followed[i], *others])

    def _if(self, path: str, schema: Mapping[str, Any], kinds: Kinds) -> Any:
        """Return the union of `if` with `then`, and of its opposite with `else`."""
        if "then" not in schema and "else" not in schema:
            return True
        cases = []
        if (then := self._followed(f"{path}/then", schema.get("then", True), kinds)) is not False:
            holds = self._followed(f"{path}/if", schema["if"], kinds)
            cases.append(all_of(self._document, [holds, then]))
        if (other := self._followed(f"{path}/else", schema.get("else", True), kinds)) is not False:
            fails = self._opposite(f"{path}/if", schema["if"], kinds)
            cases.append(all_of(self._document, [fails, other]))
        return any_of(cases)

    def _dependent(self, path: str, name: str, needs: Any) -> Any:
        """Return the union of an absent property, and of a present one with what it needs."""
        absent = {"properties": {name: False}}
        present = {"type": "object", "required": [name]}
        if isinstance(needs, list):
            if all(need == name for need in needs):
                return True
            return any_of([absent, {**present, "required": [name, *needs]}])
        followed = self._followed(path, needs, frozenset({"object"}))
        return any_of([absent, all_of(self._document, [present, followed])])

    # ---- schemas that are broken

    def _opposite(self, path: str, schema: Any, kinds: Kinds) -> Any:
        """Return a schema for the values of these kinds that break another one."""
        self._document.count(path)
        if not isinstance(schema, Mapping):
            return schema is False
        if "$ref" in schema and self._document.ref_stands_alone:
            return self._opposite_of_reference(path, schema["$ref"], kinds)
        schema = plainly_written(self._document, schema)
        inside = kinds & kinds_named(schema.get("type"))
        options = [] if inside == kinds else [other_kinds(path, kinds, inside)]
        place = Place(self._document, path, schema, inside, self._opposite)
        options += opposites_of_keywords(place)
        options += self._opposites_in_place(path, schema, inside)
        return any_of(options)

    def _opposites_in_place(
        self, path: str, schema: Mapping[str, Any], kinds: Kinds
    ) -> Iterator[Any]:
        """Yield the complements of the keywords that hold schemas for the same value."""
        for key in ("$dynamicRef", "$recursiveRef"):
            if key in schema:
                raise SchemaError(f"{path}/{key}", f"cannot be followed: {UNKNOWN[key]}")
        if "$ref" in schema:
            yield self._opposite_of_reference(path, schema["$ref"], kinds)
        for i, part in enumerate(_list(f"{path}/allOf", schema.get("allOf", []))):
            yield self._opposite(f"{path}/allOf/{i}", part, kinds)
        if "anyOf" in schema:
            yield self._none_of(f"{path}/anyOf", schema["anyOf"], kinds)
        if "oneOf" in schema:
            yield self._none_of(f"{path}/oneOf", schema["oneOf"], kinds)
            yield from self._two_of(f"{path}/oneOf", schema["oneOf"], kinds)
        if "not" in schema:
            yield self._followed(f"{path}/not", schema["not"], kinds)
        if "if" in schema:
            yield from self._opposites_of_if(path, schema, kinds)
        if "object" in kinds:
            for key in DEPENDENT:
                for name, needs in _mapping(f"{path}/{key}", schema.get(key, {})).items():
                    yield self._needs_unmet(f"{path}/{key}/{escaped(name)}", name, needs)

    def _opposite_of_reference(self, path: str, reference: Any, kinds: Kinds) -> Any:
        target = self._document.target(f"{path}/$ref", reference)
        if reference in self._opened:
            raise SchemaError(
                f"{path}/$ref", "leads back to itself inside of 'not', 'if' or 'oneOf'"
            )
        self._opened.append(reference)
        opposite = self._opposite(reference[1:], target, kinds)
        self._opened.pop()
        return opposite

    def _none_of(self, path: str, branches: Any, kinds: Kinds) -> Any:
        opposites = (
            self._opposite(f"{path}/{i}", part, kinds)
            for i, part in enumerate(_list(path, branches))
        )
        return all_of(self._document, opposites)

    def _two_of(self, path: str, branches: list[Any], kinds: Kinds) -> Iterator[Any]:
        """Yield the intersections of two branches each."""
        for j, other in enumerate(branches):
            for i, one in enumerate(branches[:j]):
                if not disjoint(self._document, one, other):
                    parts = ((i, one), (j, other))
                    followed = [self._followed(f"{path}/{n}", part, kinds) for n, part in parts]
                    yield all_of(self._document, followed)

    def _opposites_of_if(self, path: str, schema: Mapping[str, Any], kinds: Kinds) -> Iterator[Any]:
        if "then" in schema:
            holds = self._followed(f"{path}/if", schema["if"], kinds)
            broken = self._opposite(f"{path}/then", schema["then"], kinds)
            yield all_of(self._document, [holds, broken])
        if "else" in schema:
            fails = self._opposite(f"{path}/if", schema["if"], kinds)
            broken = self._opposite(f"{path}/else", schema["else"], kinds)
            yield all_of(self._document, [fails, broken])

    def _needs_unmet(self, path: str, name: str, needs: Any) -> Any:
        present = {"type": "object", "required": [name]}
        if isinstance(needs, list):
            unmet = any_of({"type": "object", "properties": {need: False}} for need in needs)
        else:
            unmet = self._opposite(path, needs, frozenset({"object"}))
        return all_of(self._document, [present, unmet])


def _list(path: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise SchemaError(path, f"is {value!r:.80}; it must be a list")
    return value


def _mapping(path: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SchemaError(path, f"is {value!r:.80}; it must be an object")
    return value
