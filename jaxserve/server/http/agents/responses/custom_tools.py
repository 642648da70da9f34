"""Parse custom tools: each becomes a function whose only argument is the tool's input."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxserve.errors import RequestError
from jaxserve.server.http.agents.listed import Notes, parsed
from jaxserve.server.http.agents.responses.tool_types import CustomFormat, CustomTool
from jaxserve.server.http.errors import UnsupportedError
from jaxserve.structure.lark import check_part, expression_of, with_unicode_classes
from jaxserve.structure.schemas.control_characters import CONTROL
from jaxserve.structure.schemas.patterns import literal_characters

INPUT = "input"  # argument of the function


class CustomFunction(NamedTuple):
    """Function that stands for a custom tool.

    `followed` is the schema that its calls follow, where it is not the one that the model sees, and
    `expression_bytes` the length of the regular expression in it.
    """

    function: dict[str, Any]
    followed: dict[str, Any] | None = None
    expression_bytes: int = 0


class InputGrammar(NamedTuple):
    """Texts that the input of a custom tool may be.

    `expression` is the regular expression of all of them, and `shown` what the schema of the input
    says of it to the model.
    """

    expression: str
    shown: dict[str, Any]


def custom_function(tool: CustomTool, path: str, max_bytes: int, notes: Notes) -> CustomFunction:
    """Return the function of a custom tool; RequestError has the path of what is wrong.

    Args:
        max_bytes: Most bytes of the regular expression that its input follows.
    """
    grammar = _grammar(tool.format, f"{path}.format", max_bytes, notes) if tool.format else None
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": _parameters(grammar.shown if grammar else {}),
        "strict": grammar is not None,
    }
    if grammar is None:
        return CustomFunction(function)
    followed = _parameters(_pattern(grammar.expression))
    return CustomFunction(function, followed, len(grammar.expression.encode()))


def _parameters(of_input: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {INPUT: {"type": "string", **of_input}},
        "required": [INPUT],
        "additionalProperties": False,
    }


def _pattern(expression: str) -> dict[str, Any]:
    return {"pattern": f"^(?:{expression})$"}


def _grammar(
    given: Mapping[str, Any], path: str, max_bytes: int, notes: Notes
) -> InputGrammar | None:
    """Return what the input of a custom tool follows; None for any text."""
    format = parsed(CustomFormat, given, notes, path)
    if format.type == "text":
        return None
    if format.type != "grammar":
        raise UnsupportedError(
            f"{path}.type", f'is {format.type!r:.80}; only "text" and "grammar" are supported'
        )
    read = READERS.get(format.syntax or "")
    if read is None:
        raise UnsupportedError(
            f"{path}.syntax", f'is {format.syntax!r:.80}; only "regex" and "lark" are supported'
        )
    where = f"{path}.definition"
    if format.definition is None:
        raise RequestError(where, "is missing; give the grammar")
    size = len(format.definition.encode())
    if size > max_bytes:
        problem = f"has {size} bytes; {max_bytes} are left for the grammars of custom tools"
        raise RequestError(where, f"{problem} (--max-grammar-bytes)")
    try:
        found = read(format.definition, max_bytes)
        _check_characters(found.expression)
    except ValueError as error:
        raise RequestError(where, str(error)) from None
    return found


def _of_lark(definition: str, max_bytes: int) -> InputGrammar:
    """Return a Lark grammar, which the model sees as it came."""
    shown = {"description": f"Text that follows this Lark grammar:\n{definition}"}
    return InputGrammar(expression_of(definition, max_bytes), shown)


def _of_regex(definition: str, max_bytes: int) -> InputGrammar:
    check_part(definition)
    return InputGrammar(with_unicode_classes(definition), _pattern(definition))


def _check_characters(expression: str) -> None:
    """Raise ValueError for a control character that a pattern in a JSON schema cannot have."""
    found = next(filter(CONTROL.match, literal_characters(expression)), None)
    if found is not None:
        raise ValueError(f"has the control character U+{ord(found):04X}, which no call can hold")


READERS: Mapping[str, Callable[[str, int], InputGrammar]] = MappingProxyType(
    {"lark": _of_lark, "regex": _of_regex}
)
