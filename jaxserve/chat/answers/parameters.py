"""Arguments that a model writes one by one, as text: JSON by the schemas of the function."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxserve.chat.answers.events import BegunCall, FoundCall, Parse
from jaxserve.chat.answers.incremental import SPACES, IncomingText
from jaxserve.chat.answers.json_text import BeyondBoundsError, is_bounded_object, parse
from jaxserve.chat.answers.schema_kinds import NULL, STRING, Kind, Kinds, properties

UNKNOWN = Kind(frozenset({STRING}))  # the kind of a parameter that nobody declared
# Around and between the members of an object.
OPENING = "{"
SEPARATOR = ", "
CLOSING = "}"
# Templates write null as Python does, and models do as they read.
NULLS = ("null", "None")
WORDS = MappingProxyType({"True": "true", "False": "false", "None": "null"})
# Strings of Python, strings of JSON, and words, in what is otherwise JSON. Strings without an end
# match as well: they are read once.
PYTHON = re.compile(
    r"""'(?P<text>(?:[^'\\]|\\.)*+)(?P<end>'?)|"(?:[^"\\]|\\.)*+"?|\b(?:True|False|None)\b""",
    re.DOTALL,
)
# In a Python text: an escape that JSON does not have, or a quote that it has to escape.
ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})|\\(')|(\")|\\.", re.DOTALL)


def read_value(text: IncomingText, end: str, following: Sequence[str]) -> Parse[str | None]:
    """Read a value up to the mark that ends it; the result is None where there is none.

    That is the first one with one of `following` behind it, or the end of the text: a value may
    hold the mark as well.
    """
    parts: list[str] = []
    while (part := (yield from text.read_past(end))) is not None:
        parts.append(part)
        gap = yield from text.read_while(SPACES)
        if not (yield from text.peek()):
            return "".join(parts)
        for mark in following:
            if (yield from text.is_next(mark)):
                return "".join(parts)
        parts += (end, gap)
    return None


def holds_another(
    value: str, head: re.Pattern[str], names: Collection[str], written: Sequence[tuple[str, str]]
) -> bool:
    """Return whether a value goes on with another parameter, as its own end is missing.

    Args:
        head: Expression of what begins a parameter, with its name as the group.
        names: Names of all parameters.
        written: Names that came before, with their values.
    """
    before = {name for name, _ in written}
    return any(name in names and name not in before for name in head.findall(value))


class Parameters:
    """Parameters of the functions that an answer may call."""

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]):
        self._functions = functions
        self._kinds: dict[str, Mapping[str, Kind]] = {}
        self._others: dict[str, Kind] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    def of(self, function: str) -> Mapping[str, Kind]:
        """Return the kinds of a function's parameters by name."""
        if function not in self._kinds:
            schema = self._functions[function]
            kinds = Kinds(schema)
            found = {name: kinds.of(each) for name, each in properties(schema).items()}
            self._kinds[function] = found
        return self._kinds[function]

    def arguments(self, function: str, written: Sequence[tuple[str, str]]) -> str | None:
        """Return names and texts as JSON text of an object; None where a call may not have them.

        That is where a name comes twice, or where a value is beyond the bounds of arguments.
        """
        members = [self._member(function, name, text) for name, text in written]
        arguments = _object(members)
        return arguments if is_bounded_object(arguments) else None

    def certain_member(self, function: str, name: str, text: str) -> str:
        """Return a name and a text as JSON text of a member, within the bounds of arguments.

        A value beyond them is a string: what was told before it cannot be taken back.
        """
        member = self._member(function, name, text)
        is_bounded = is_bounded_object(_object([member]))
        return member if is_bounded else f"{_quoted(name)}: {_quoted(text)}"

    def _member(self, function: str, name: str, text: str) -> str:
        """Return a name and a text as JSON text of a member."""
        kind = self.of(function).get(name) or self._kind_of_others(function)
        return f"{_quoted(name)}: {value_of(text, kind)}"

    def _kind_of_others(self, function: str) -> Kind:
        """Return the kind of parameters that the schema does not name."""
        if function not in self._others:
            schema = self._functions[function]
            others = schema.get("additionalProperties")
            kind = Kinds(schema).of(others) if isinstance(others, Mapping) else UNKNOWN
            self._others[function] = kind
        return self._others[function]


class WrittenCall:
    """Call while its parameters are read.

    A call that is certain is told meanwhile, parameter by parameter. In such a call a name that
    comes again has no effect, as its first value was told.

    Args:
        head: Expression of what begins a parameter, with its name as the group.
    """

    def __init__(
        self, text: IncomingText, parameters: Parameters, function: str, head: re.Pattern[str]
    ):
        self._text = text
        self._parameters = parameters
        self._function = function
        self._head = head
        self._written: list[tuple[str, str]] = []
        self._told = set[str]()
        self.begun: BegunCall | None = None  # the call that was told, if it is certain

    def begin(self) -> Parse[None]:
        """Tell the head of a call that is certain."""
        if self._text.certain:
            self.begun = yield from self._text.begin_call(self._function)

    def add(self, name: str, value: str) -> Parse[bool]:
        """Add a parameter; the result is false where the value goes on with another one."""
        if self.begun:
            yield from self._tell(name, value)
            return True
        if holds_another(value, self._head, self._parameters.of(self._function), self._written):
            return False
        self._written.append((name, value))
        return True

    def _tell(self, name: str, value: str) -> Parse[None]:
        if name in self._told:
            self._text.accept()
            return
        before = SEPARATOR if self._told else OPENING
        self._told.add(name)
        member = self._parameters.certain_member(self._function, name, value)
        yield from self._text.tell(before + member)

    def end(self) -> Parse[BegunCall | FoundCall | None]:
        """Return the call, which is complete; None where it may not have its arguments."""
        if self.begun:
            yield from self._text.tell(CLOSING if self._told else _object([]))
            return self.begun
        arguments = self._parameters.arguments(self._function, self._written)
        return None if arguments is None else FoundCall(self._function, arguments)


def value_of(text: str, kind: Kind) -> str:
    """Return the text of a value as JSON: as a string where that is a value of the kind.

    Other JSON stays as it is written. Text that is no JSON is a string against the schema, so that
    the one who called can be told.
    """
    if kind.names_null and text.strip() in NULLS and text not in (kind.texts or ()):
        return "null"
    if kind.types & {"object", "array"} and _is_structured(text):
        return text.strip()  # rather than as a string, if both are allowed
    if STRING in kind.types and (
        kind.texts is None or text in kind.texts or kind.types <= {STRING, NULL}
    ):
        return _quoted(text)
    for candidate in (text.strip(), _from_python(text.strip())):
        try:
            parse(candidate)
        except BeyondBoundsError:
            return candidate  # which is_bounded_object refuses
        except ValueError:
            continue
        return candidate
    return _quoted(text)


def _is_structured(text: str) -> bool:
    """Return whether a text is a JSON object or array within the bounds."""
    if not text.lstrip().startswith(("{", "[")):
        return False
    try:
        parse(text)
    except ValueError:
        return False
    return True


def _object(members: Iterable[str]) -> str:
    """Return the JSON text of an object with these members."""
    return f"{OPENING}{SEPARATOR.join(members)}{CLOSING}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _from_python(text: str) -> str:
    """Return a Python literal as JSON; other text becomes some text that is no JSON either."""

    def token(found: re.Match[str]) -> str:
        if found["end"]:
            return f'"{ESCAPE.sub(escape, found["text"])}"'
        return WORDS.get(found[0], found[0])

    def escape(found: re.Match[str]) -> str:
        code, single, double = found.groups()
        if code:
            return f"\\u00{code}"
        return "'" if single else '\\"' if double else found[0]

    return PYTHON.sub(token, text)
