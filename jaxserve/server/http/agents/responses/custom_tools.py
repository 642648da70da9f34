"""Parse custom tools: each becomes a function whose only argument is the tool's input."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxserve.errors import RequestError
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.agents.listed import Notes, parsed
from jaxserve.server.http.agents.responses.tool_types import CustomFormat, CustomTool
from jaxserve.server.http.errors import UnsupportedError
from jaxserve.structure.lark import check_part, expression_of

INPUT = "input"  # argument of the function


class CustomFunction(NamedTuple):
    """Function that stands for a custom tool.

    `followed` is the schema that its calls follow, where it is not the one that the model sees.
    """

    function: dict[str, Any]
    followed: dict[str, Any] | None


class InputGrammar(NamedTuple):
    """Texts that the input of a custom tool may be.

    `expression` is the regular expression of all of them, and `shown` what the schema of the input
    says of it to the model.
    """

    expression: str
    shown: dict[str, Any]


def custom_function(tool: CustomTool, path: str, limits: Limits, notes: Notes) -> CustomFunction:
    """Return the function of a custom tool; RequestError has the path of what is wrong."""
    grammar = _grammar(tool.format, f"{path}.format", limits, notes) if tool.format else None
    shown = grammar.shown if grammar else {}
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": _parameters(shown),
        "strict": grammar is not None,
    }
    if grammar is None:
        return CustomFunction(function, None)
    return CustomFunction(function, _parameters(_pattern(grammar.expression)))


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
    given: Mapping[str, Any], path: str, limits: Limits, notes: Notes
) -> InputGrammar | None:
    """Return what the input of a custom tool follows; None for any text."""
    format = parsed(CustomFormat, given, notes, path)
    if format.type == "text":
        return None
    if format.type != "grammar":
        raise UnsupportedError(
            f"{path}.type", f'is {format.type!r:.80}; only "text" and "grammar" are supported'
        )
    if format.syntax not in ("regex", "lark"):
        raise UnsupportedError(
            f"{path}.syntax", f'is {format.syntax!r:.80}; only "regex" and "lark" are supported'
        )
    where = f"{path}.definition"
    if format.definition is None:
        raise RequestError(where, "is missing; give the grammar")
    size = len(format.definition.encode())
    if size > limits.max_grammar_bytes:
        problem = f"has {size} bytes; the limit is {limits.max_grammar_bytes}"
        raise RequestError(where, f"{problem} (--max-grammar-bytes)")
    try:
        if format.syntax == "lark":
            return _of_lark(format.definition, limits)
        check_part(format.definition)
    except ValueError as error:
        raise RequestError(where, str(error)) from None
    return InputGrammar(format.definition, _pattern(format.definition))


def _of_lark(definition: str, limits: Limits) -> InputGrammar:
    """Return a Lark grammar, which the model sees as it came."""
    expression = expression_of(definition, limits.max_grammar_bytes)
    return InputGrammar(
        expression, {"description": f"Text that follows this Lark grammar:\n{definition}"}
    )
