"""Grammars of arguments that a model writes one by one, as text and not as JSON."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxserve.chat.answers.call_grammar import ANY_TEXT, CallContext, json_rule, literal
from jaxserve.chat.answers.schema_kinds import NULL, STRING, Kinds, pointed_to
from jaxserve.chat.answers.text_patterns import expression_of

ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly $comment $schema $id".split()
)
DEFINITIONS = ("$defs", "definitions")
OF_OBJECTS = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", *DEFINITIONS}
OF_TEXTS = frozenset({"pattern", "minLength", "maxLength", "format"})
# Keywords that say nothing about a string.
OF_OTHERS = frozenset(
    "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf items prefixItems minItems "
    "maxItems uniqueItems contains minContains maxContains properties required propertyNames "
    "additionalProperties patternProperties minProperties maxProperties".split()
)
REFERENCE = "$ref"
LONGEST_CHAIN = 32  # of references
MOST_STEPS = 4096  # schemas and values that one function's are looked through for
MAX_RULES = 256 * 1024  # characters of rules of one function


@dataclass(frozen=True)
class ParameterSyntax:
    """One parameter of a call as a format writes it, with a value that is text.

    `opening` writes the expression of everything before the value, given that of the name. `key` is
    the regular expression of a name, `closing` the mark behind the value. `margin` stands between
    the value and what is around it, but for the one before, which the opening has. `after` is the
    expression behind the closing mark.
    """

    opening: Callable[[CallContext, str], str]
    key: str
    closing: str
    margin: str
    after: str

    def rules(self, context: CallContext, rule: str, schema: Mapping[str, Any]) -> Sequence[str]:
        """Return the rules of arguments that follow a schema, beginning with `rule`.

        The parameters come in the order of the schema. An empty schema allows any. ValueError is
        raised where the rules cannot be certain to follow it.
        """
        if not schema:
            value = f"{rule}_value"
            opening = self.opening(context, f"/{self.key}/")
            free = self._free(context, value)
            return [f"{rule}: ({opening} {value} {self.after})*", free]
        return _Arguments(self, context, rule, schema).rules()

    def _free(self, context: CallContext, rule: str) -> str:
        """Return the rule of any text up to the closing mark, and the mark."""
        return self.closed(context, rule, ANY_TEXT)

    def closed(self, context: CallContext, rule: str, text: str) -> str:
        """Return the rule of text by an expression, and the closing mark.

        The first mark ends the text, even if the expression allows it inside.
        """
        if self.closing in context.special:
            return f"{rule}: {text} {context.mark(self.closing)}"
        return f"{rule}[lazy]: {text} {literal(self.closing)}"


@dataclass(frozen=True)
class _Text:
    """Strings by the keywords of a schema."""

    schema: Mapping[str, Any]


@dataclass(frozen=True)
class _Fixed:
    """One string."""

    text: str


@dataclass(frozen=True)
class _Json:
    """Values of other types, as JSON."""

    schema: Mapping[str, Any]


type _Form = _Text | _Fixed | _Json


NONE = _Fixed("null")


class _Arguments:
    """Rules of one function's arguments while they are written."""

    def __init__(
        self, syntax: ParameterSyntax, context: CallContext, rule: str, schema: Mapping[str, Any]
    ) -> None:
        self._syntax = syntax
        self._context = context
        self._rule = rule
        self._root = schema
        self._kinds = Kinds(schema)
        self._steps = 0

    def rules(self) -> list[str]:
        """Return all rules."""
        _check_shape(self._root)
        _refuse_others(self._root, OF_OBJECTS)
        if "object" not in self._kinds.of(self._root).types:
            raise ValueError("are no object")
        properties = self._root.get("properties") or {}
        required = self._root.get("required") or []
        if missing := [name for name in required if name not in properties]:
            raise ValueError(f"{missing[0]!r:.80} is required, and not among the properties")
        sequence: list[str] = []
        rules: list[str] = []
        size = 0
        written = 0
        for i, (name, schema) in enumerate(properties.items()):
            if schema is False and name not in required:
                continue
            value = f"{self._rule}_{i}"
            if not re.fullmatch(self._syntax.key, name):
                raise ValueError(f"{name!r:.80} is no name that the format can hold")
            opening = self._syntax.opening(self._context, literal(name))
            one = f"{opening} {value} {self._syntax.after}"
            sequence.append(one if name in required else f"({one})?")
            try:
                rules += self._value(value, schema)
            except ValueError as error:
                raise ValueError(f"{name!r:.80} {error}") from None
            size += sum(map(len, rules[written:]))
            written = len(rules)
            if size > MAX_RULES:
                raise ValueError(f"take more than {MAX_RULES} characters of grammar")
        return [f"{self._rule}: {' '.join(sequence) or literal('')}", *rules]

    def _value(self, rule: str, schema: Any) -> list[str]:
        """Return the rules of a value and of the mark behind it."""
        forms = list(self._forms({} if schema is True else schema, 0))
        if not forms:
            raise ValueError("allows no value")
        if any(isinstance(form, _Text) for form in forms):
            # Values of other types would be read as text.
            return [self._syntax.closed(self._context, rule, self._texts(forms))]
        rules: list[str] = []
        for i, form in enumerate(forms):
            rules += self._one(f"{rule}_{i}", form)
        choices = " | ".join(f"{rule}_{i}" for i in range(len(forms)))
        return [f"{rule}: {choices}", *rules]

    def _texts(self, forms: Sequence[_Form]) -> str:
        """Return the expression of all forms that are text, and of the margin behind them."""
        margin = self._syntax.margin
        found: list[str] = []
        for form in forms:
            match form:
                case _Text(schema):
                    found.append(expression_of(schema, margin, self._syntax.closing))
                case _Fixed(text):
                    found.append(literal(self._without_mark(text) + margin))
                case _Json():
                    pass
        # All in one, for what is read as one: of two expressions, the longer match would win.
        return ANY_TEXT if ANY_TEXT in found else f"({' | '.join(found)})"

    def _one(self, rule: str, form: _Form) -> list[str]:
        """Return the rules of a form of a value that is no free text, and of the mark behind it."""
        assert not isinstance(form, _Text)
        end = self._context.mark(self._syntax.closing)
        if self._syntax.margin:
            end = f"{literal(self._syntax.margin)} {end}"
        if isinstance(form, _Fixed):
            text = self._without_mark(form.text)
            return [f"{rule}: {literal(text)} {end}" if text else f"{rule}: {end}"]
        return [f"{rule}: {rule}_json {end}", json_rule(f"{rule}_json", form.schema)]

    def _without_mark(self, text: str) -> str:
        if self._syntax.closing in text:
            raise ValueError(f"has a value with {self._syntax.closing}")
        return text

    def _forms(self, schema: Any, depth: int) -> Iterator[_Form]:
        """Yield the forms that values of a schema have."""
        if not isinstance(schema, Mapping) or depth > LONGEST_CHAIN:
            raise ValueError("has a schema that is none, or refers to itself")
        _check_shape(schema)
        self._count(1)
        for branches in _branches(schema):
            for branch in branches:
                yield from self._forms(branch, depth + 1)
            return
        if REFERENCE in schema:
            _refuse_others(schema, ANNOTATIONS | {REFERENCE})
            yield from self._forms(pointed_to(self._root, schema[REFERENCE]), depth + 1)
        elif "enum" in schema or "const" in schema:
            yield from self._listed(schema)
        else:
            yield from self._typed(schema)

    def _count(self, steps: int) -> None:
        """Count schemas and values; ValueError beyond MOST_STEPS: few references make many."""
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise ValueError(f"has more than {MOST_STEPS} alternatives")

    def _listed(self, schema: Mapping[str, Any]) -> Iterator[_Form]:
        """Yield the values that a schema lists, if they are of its type."""
        _refuse_others(schema, ANNOTATIONS | {"type", "enum", "const"})
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if "enum" in schema and "const" in schema:
            values = [value for value in values if value == schema["const"]]
        self._count(len(values))
        types = self._kinds.of({"type": schema["type"]} if "type" in schema else {}).types
        values = [value for value in values if self._kinds.of({"const": value}).types & types]
        for value in values:
            if isinstance(value, str | None):
                yield NONE if value is None else _Fixed(value)
        if others := [value for value in values if not isinstance(value, str | None)]:
            yield _Json({"enum": others})

    def _typed(self, schema: Mapping[str, Any]) -> Iterator[_Form]:
        """Yield a form of each type of a schema without alternatives."""
        kind = self._kinds.of(schema)
        if STRING in kind.types:
            known = ANNOTATIONS | OF_TEXTS | OF_OTHERS | {"type", *DEFINITIONS}
            _refuse_others(schema, known)
            yield _Text({key: schema[key] for key in OF_TEXTS if key in schema})
        if kind.names_null:
            yield NONE
        types = schema.get("type", [] if STRING in kind.types else list(kind.types))
        for each in [types] if isinstance(types, str) else types:
            if each not in (STRING, NULL):
                yield self._json({**schema, "type": each})

    def _json(self, schema: Mapping[str, Any]) -> _Json:
        """Return values as JSON by a schema, with the definitions that it may refer to."""
        schema = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        if f'"{REFERENCE}"' not in json.dumps(schema):
            return _Json(schema)
        definitions = {key: self._root[key] for key in DEFINITIONS if key in self._root}
        for reference in _references({**schema, **definitions}):
            if not any(str(reference).startswith(f"#/{key}/") for key in DEFINITIONS):
                raise ValueError(f"refers to {reference!r:.80}, which is no definition")
        return _Json({**schema, **definitions})


def _branches(schema: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    """Yield the alternatives of a schema that consists of alternatives; nothing for another one."""
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := schema.get(keyword), list):
            _refuse_others(schema, ANNOTATIONS | {keyword})
            if keyword == "allOf" and len(branches) != 1:
                raise ValueError("has allOf")
            yield branches


def _references(schema: Any) -> Iterator[Any]:
    """Yield all references in a schema, and whatever else looks like one."""
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key == REFERENCE:
                yield value
            yield from _references(value)
    elif isinstance(schema, list):
        for each in schema:
            yield from _references(each)


def _check_shape(schema: Mapping[str, Any]) -> None:
    """Raise ValueError for a keyword whose value is of a type that it cannot have."""
    for keyword, is_right in SHAPES.items():
        if keyword in schema and not is_right(schema[keyword]):
            raise ValueError(f"has {keyword!r} of a wrong type")


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


# Keywords with whether a value is of the type that they have.
SHAPES: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "type": lambda value: isinstance(value, str) or _is_strings(value),
        "properties": lambda value: isinstance(value, Mapping),
        "required": _is_strings,
        "enum": lambda value: isinstance(value, list),
        **dict.fromkeys(("$ref", "format", "pattern"), lambda value: isinstance(value, str)),
        **dict.fromkeys(("anyOf", "oneOf", "allOf"), lambda value: isinstance(value, list)),
    }
)


def _refuse_others(schema: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise ValueError for a keyword that is not known."""
    if unknown := sorted(schema.keys() - known):
        raise ValueError(f"has {unknown[0]!r:.80}")
