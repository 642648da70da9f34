"""Schemas written without the keywords that the grammar library does not know.

`not` becomes the complement of what it holds, `oneOf` a union whose branches exclude each other,
`if` a union of two cases, and dependent keywords unions of a property that is absent and of what
its presence demands. Definitions that are referred to move to `$defs`. What cannot be written so is
refused with its path.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

from jaxserve.structure.schemas.combine import all_of, any_of, in_one, parts_of_all
from jaxserve.structure.schemas.complement import Place, opposites_of_keywords, other_kinds
from jaxserve.structure.schemas.conjunction import Conjunction, kinds_of
from jaxserve.structure.schemas.disjoint import all_disjoint, disjoint
from jaxserve.structure.schemas.document import Document
from jaxserve.structure.schemas.errors import SchemaError
from jaxserve.structure.schemas.finish import Names, finished, with_definitions
from jaxserve.structure.schemas.keywords import DEFINITIONS, check_shapes, escaped, with_held
from jaxserve.structure.schemas.kinds import Kinds, kinds_named
from jaxserve.structure.schemas.plain import plainly_written
from jaxserve.structure.schemas.walk import goes_by_names, schemas

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
FOREIGN: Final = "is no keyword of the schema's draft, which $schema names (by default 2020-12)"
SILENT: Final = ("minContains", "maxContains", "$dynamicAnchor", "$recursiveAnchor")
# Keywords of a schema that are written anew, or not at all.
NOT_OWN: Final = frozenset((*REWRITTEN, *SILENT, *DEFINITIONS, "allOf", "anyOf"))
# Keywords that say something beside a $ref until draft 7.
ALONE: Final = ("$ref", "$schema", "$id")


def rewritten(root: Any) -> Any:
    """Return a schema that the same values follow, in keywords that the library knows.

    A schema that has no others is returned as it is, and so is one whose references go by names
    ($id or $anchor inside): the library resolves these, and refuses what it does not know.

    Raises:
        SchemaError: A keyword cannot be followed; the text has its path.
    """
    if not _has_unknown(root) or goes_by_names(root):
        return root
    return _Rewriting(root).whole()


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
        self._opened: list[str] = []  # references inside of which a complement is being written

    def whole(self) -> Any:
        names = Names()
        root = finished(self._followed("", self._root, True), names)
        definitions = dict[str, Any]()
        while waiting := names.after(len(definitions)):
            reference = waiting[0]
            target = self._document.target(reference, reference)
            followed = self._followed(unquote(reference[1:]), target, True)
            definitions[names.name(reference)] = finished(followed, names)
        return with_definitions(root, definitions)

    # ---- schemas that are followed

    def _followed(self, path: str, schema: Any, beside: Any) -> Any:
        """Return a schema as it is followed by values that follow `beside` as well."""
        self._document.count(path)
        if not isinstance(schema, Mapping):
            return schema
        check_shapes(path, schema)
        if "$ref" in schema and self._document.ref_stands_alone:
            return {key: value for key, value in schema.items() if key in ALONE}
        unchanged = {key: value for key, value in schema.items() if key not in REWRITTEN}
        together = {"allOf": [beside, unchanged]}
        if not kinds_of(self._document, together):
            return False
        plain = plainly_written(self._document, schema)
        for key in UNKNOWN:
            if key in plain:
                raise SchemaError(f"{path}/{key}", f"cannot be followed: {UNKNOWN[key]}")
        own = {key: value for key, value in plain.items() if key not in NOT_OWN}
        own = with_held(own, lambda place, part: self._followed(f"{path}/{place}", part, True))
        return self._joined(own, [*self._demands(path, plain, together)])

    def _joined(self, own: dict[str, Any], demands: list[Any]) -> Any:
        """Return a schema's own keywords with what it demands besides, in one schema.

        Its own come first, since properties are written in the order in which they are read.
        """
        parts = parts_of_all(self._document, [own, *demands])
        if parts is None:
            return False
        rest = [part for part in parts if part is not own]
        if not own or not rest:
            return in_one(parts)
        is_union = len(rest) == 1 and rest[0].keys() == {"anyOf"}
        return {**own, **rest[0]} if is_union else {**own, "allOf": rest}

    def _demands(self, path: str, schema: Mapping[str, Any], together: Any) -> Iterator[Any]:
        """Yield what the keywords that hold schemas of the same value demand of it.

        `together` is what the other keywords, here and above, say of the value.
        """
        for i, part in enumerate(schema.get("allOf", ())):
            yield self._followed(f"{path}/allOf/{i}", part, together)
        if "anyOf" in schema:
            options = enumerate(schema["anyOf"])
            yield any_of(self._followed(f"{path}/anyOf/{i}", part, together) for i, part in options)
        if "not" in schema:
            yield self._opposite(f"{path}/not", schema["not"], together)
        if "oneOf" in schema:
            yield self._one_of(f"{path}/oneOf", schema["oneOf"], together)
        if "if" in schema:
            yield self._if(path, schema, together)
        for key in DEPENDENT:
            for name, needs in schema.get(key, {}).items():
                yield self._dependent(f"{path}/{key}/{escaped(name)}", name, needs)

    def _one_of(self, path: str, branches: list[Any], together: Any) -> Any:
        """Return the union of branches, each without those that it may hold together with."""
        followed = [
            self._followed(f"{path}/{i}", part, together) for i, part in enumerate(branches)
        ]
        if all_disjoint(self._document, branches):
            return any_of(followed)
        return any_of(
            self._alone(path, branches, followed, i, together) for i in range(len(branches))
        )

    def _alone(
        self, path: str, branches: list[Any], followed: list[Any], i: int, together: Any
    ) -> Any:
        """Return a branch without the values that follow another one too."""
        own = {"allOf": [together, branches[i]]}
        others = [
            self._opposite(f"{path}/{j}", other, own)
            for j, other in enumerate(branches)
            if j != i and not disjoint(self._document, branches[i], other)
        ]
        return all_of(self._document, [followed[i], *others])

    def _if(self, path: str, schema: Mapping[str, Any], together: Any) -> Any:
        """Return the union of `if` with `then`, and of its opposite with `else`."""
        if "then" not in schema and "else" not in schema:
            return True
        cases = []
        then = self._followed(f"{path}/then", schema.get("then", True), together)
        if then is not False:
            holds = self._followed(f"{path}/if", schema["if"], together)
            cases.append(all_of(self._document, [holds, then]))
        other = self._followed(f"{path}/else", schema.get("else", True), together)
        if other is not False:
            fails = self._opposite(f"{path}/if", schema["if"], together)
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
        followed = self._followed(path, needs, present)
        return any_of([absent, all_of(self._document, [present, followed])])

    # ---- schemas that are broken

    def _opposite(self, path: str, schema: Any, beside: Any) -> Any:
        """Return a schema for the values that follow `beside` and break another schema.

        It holds together with `beside` alone, and may say less for other values.
        """
        self._document.count(path)
        if not isinstance(schema, Mapping):
            return schema is False
        check_shapes(path, schema)
        if "$ref" in schema and self._document.ref_stands_alone:
            return self._opposite_of_reference(path, schema["$ref"], beside)
        schema = plainly_written(self._document, schema)
        known = Conjunction(self._document, beside)
        inside = known.kinds & kinds_named(schema.get("type"))
        options = [] if inside == known.kinds else [other_kinds(path, known.kinds, inside)]
        place = Place(self._document, path, schema, inside, known, self._opposite)
        options += opposites_of_keywords(place)
        options += self._opposites_in_place(path, schema, inside, beside)
        return any_of(options)

    def _opposites_in_place(
        self, path: str, schema: Mapping[str, Any], kinds: Kinds, beside: Any
    ) -> Iterator[Any]:
        """Yield the complements of the keywords that hold schemas for the same value."""
        for key in schema:
            if key in ("$dynamicRef", "$recursiveRef"):
                raise SchemaError(f"{path}/{key}", f"cannot be followed: {UNKNOWN[key]}")
            if not self._document.knows(key):
                raise SchemaError(f"{path}/{key}", FOREIGN)
        if "$ref" in schema:
            yield self._opposite_of_reference(path, schema["$ref"], beside)
        for i, part in enumerate(schema.get("allOf", ())):
            yield self._opposite(f"{path}/allOf/{i}", part, beside)
        if "anyOf" in schema:
            yield self._none_of(f"{path}/anyOf", schema["anyOf"], beside)
        if "oneOf" in schema:
            yield self._none_of(f"{path}/oneOf", schema["oneOf"], beside)
            yield from self._two_of(f"{path}/oneOf", schema["oneOf"], beside)
        if "not" in schema:
            yield self._followed(f"{path}/not", schema["not"], beside)
        if "if" in schema:
            yield from self._opposites_of_if(path, schema, beside)
        if "object" in kinds:
            for key in DEPENDENT:
                for name, needs in schema.get(key, {}).items():
                    yield self._needs_unmet(f"{path}/{key}/{escaped(name)}", name, needs)

    def _opposite_of_reference(self, path: str, reference: Any, beside: Any) -> Any:
        target = self._document.target(f"{path}/$ref", reference)
        if reference in self._opened:
            raise SchemaError(
                f"{path}/$ref", "leads back to itself inside of 'not', 'if' or 'oneOf'"
            )
        self._opened.append(reference)
        opposite = self._opposite(unquote(reference[1:]), target, beside)
        self._opened.pop()
        return opposite

    def _none_of(self, path: str, branches: list[Any], beside: Any) -> Any:
        opposites = (self._opposite(f"{path}/{i}", part, beside) for i, part in enumerate(branches))
        return all_of(self._document, opposites)

    def _two_of(self, path: str, branches: list[Any], beside: Any) -> Iterator[Any]:
        """Yield the intersections of two branches each."""
        for j, other in enumerate(branches):
            for i, one in enumerate(branches[:j]):
                if not disjoint(self._document, one, other):
                    parts = ((i, one), (j, other))
                    followed = [self._followed(f"{path}/{n}", part, beside) for n, part in parts]
                    yield all_of(self._document, followed)

    def _opposites_of_if(self, path: str, schema: Mapping[str, Any], beside: Any) -> Iterator[Any]:
        if "then" in schema:
            holds = self._followed(f"{path}/if", schema["if"], beside)
            broken = self._opposite(f"{path}/then", schema["then"], beside)
            yield all_of(self._document, [holds, broken])
        if "else" in schema:
            fails = self._opposite(f"{path}/if", schema["if"], beside)
            broken = self._opposite(f"{path}/else", schema["else"], beside)
            yield all_of(self._document, [fails, broken])

    def _needs_unmet(self, path: str, name: str, needs: Any) -> Any:
        present = {"type": "object", "required": [name]}
        if isinstance(needs, list):
            unmet = any_of({"type": "object", "properties": {need: False}} for need in needs)
        else:
            unmet = self._opposite(path, needs, present)
        return all_of(self._document, [present, unmet])
