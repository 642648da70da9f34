"""Grammars of answers that call functions, in llguidance's dialect of Lark."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LIBRARY_OPTIONS = "x-guidance"  # keyword of llguidance; a client's schema sets none
ANY_TEXT = "/(?s:.*)/"  # (?s: lets the point match line ends


@dataclass(frozen=True)
class CallContext:
    """Request and vocabulary that a format writes its grammar for.

    `names` are those of the functions that may be called; `parallel` allows several calls in one
    answer; `special` maps special tokens to their ids. The grammar's rule `arguments_i` is what
    function i takes: a JSON object, or as CallSyntax.arguments writes it.
    """

    names: Sequence[str]
    parallel: bool
    special: Mapping[str, int]

    def mark(self, text: str) -> str:
        """Return the expression of a mark: its token's id where it is a special token.

        A special token never matches its spelling as text, so a literal would be out of reach.
        """
        return f"<[{self.special[text]}]>" if text in self.special else literal(text)

    def any_of(self, write: Callable[[str, str], str]) -> str:
        """Return the expression of one call of any function.

        `write` makes one function's from its name and the rule of its arguments.
        """
        calls = [write(name, f"arguments_{i}") for i, name in enumerate(self.names)]
        return f"({' | '.join(calls)})"

    def objects(self, key: str) -> str:
        """Return the expression of one call as a JSON object: {"name": "add", key: {...}}."""

        def write(name: str, rule: str) -> str:
            head = f'{{"name": {json.dumps(name)}, "{key}": '
            return f"{literal(head)} {rule} {literal('}')}"

        return self.any_of(write)

    def joined(self, call: str, between: str) -> str:
        """Return the expression of one call, or of any number of them where that is allowed."""
        return f"{call} ({between} {call})*" if self.parallel else call


class ParametersError(ValueError):
    """Parameters of a function have a schema that the format of calls cannot be made to follow."""


def json_rule(name: str, schema: Mapping[str, Any]) -> str:
    """Return a rule for JSON by a schema."""
    given = {key: value for key, value in schema.items() if key != LIBRARY_OPTIONS}
    return f"{name}: %json {json.dumps(given, ensure_ascii=False)}"


def json_arguments(context: CallContext, rule: str, schema: Mapping[str, Any]) -> Sequence[str]:
    """Return the rule of arguments that are a JSON object."""
    return [json_rule(rule, {**schema, "type": "object"})]


@dataclass(frozen=True)
class CallSyntax:
    """Grammar of a format's calls.

    `opening` is the mark before the first call, empty where the format has none. `rest` writes the
    expression of everything after the opening. `beside_text` writes the rules of an answer with
    text beside calls, for a format whose mark stands before text, too. `arguments` writes the rules
    of one function's arguments, given the name of the first rule and their schema; it raises
    ValueError for a schema that the format cannot be made to follow.
    """

    opening: str
    rest: Callable[[CallContext], str]
    beside_text: Callable[[CallContext], str] | None = None
    arguments: Callable[[CallContext, str, Mapping[str, Any]], Sequence[str]] = json_arguments


@dataclass(frozen=True)
class Lead:
    """Expression that an answer begins with, and the rules that it uses."""

    expression: str = ""
    rules: tuple[str, ...] = ()

    @property
    def frame(self) -> str:
        """Grammar of the lead and another one behind it, see Structure.frame; empty without."""
        if not self.expression:
            return ""
        return "\n".join([f"start: {self.expression} @body", *self.rules])


def literal(text: str) -> str:
    """Return the expression of a fixed text."""
    return json.dumps(text, ensure_ascii=False)


def calls_alone(
    syntax: CallSyntax,
    context: CallContext,
    schemas: Sequence[Mapping[str, Any]],
) -> str:
    """Return the grammar of an answer that consists of calls only.

    `schemas` are those of the arguments, one per function. ParametersError is raised for one that
    the format cannot be made to follow.
    """
    return "\n".join([f"start: {_calls(syntax, context)}", *_arguments(syntax, context, schemas)])


def calls_or_body(
    syntax: CallSyntax,
    context: CallContext,
    schemas: Sequence[Mapping[str, Any]],
    before_calls: Lead,
    before_body: Lead,
) -> str:
    """Return the grammar of an answer of calls only, or of what another grammar, @body, says.

    Arguments and errors are as of `calls_alone`; both forms of the answer have a lead.
    """
    calls = f"{before_calls.expression} {_calls(syntax, context)}"
    rules = dict.fromkeys((*before_calls.rules, *before_body.rules))
    start = f"start: {calls} | {before_body.expression} @body"
    return "\n".join([start, *rules, *_arguments(syntax, context, schemas)])


def _calls(syntax: CallSyntax, context: CallContext) -> str:
    """Return the expression of an answer's calls."""
    opening = [context.mark(syntax.opening)] if syntax.opening else []
    return " ".join([*opening, syntax.rest(context)])


def text_and_calls(
    syntax: CallSyntax,
    context: CallContext,
    schemas: Sequence[Mapping[str, Any]],
    text_tokens: Collection[str],
) -> str:
    """Return the grammar of an answer whose text is free before and after well-formed calls.

    `text_tokens` are special tokens that the text may contain. ValueError is raised where no mark
    tells text and calls apart, ParametersError as by `calls_alone`.
    """
    if syntax.beside_text:
        return "\n".join([syntax.beside_text(context), *_arguments(syntax, context, schemas)])
    again = "*" if context.parallel else "?"
    marks = [context.mark(name) for name in text_tokens if name in context.special]
    if syntax.opening in context.special:
        text = f"({' | '.join(['SOME', *marks])})*"
        start = f"start: text ({context.mark(syntax.opening)} calls text){again}"
        rules = [f"text: {text}", "SOME: /(?s:.+)/"]
    elif syntax.opening and not marks:
        start = f"start: (opening calls){again} TEXT"
        rules = [f"opening[lazy]: {ANY_TEXT} {literal(syntax.opening)}", f"TEXT: {ANY_TEXT}"]
    else:
        raise ValueError("no mark of its own stands before a call")
    return "\n".join(
        [start, *rules, f"calls: {syntax.rest(context)}", *_arguments(syntax, context, schemas)]
    )


def _arguments(
    syntax: CallSyntax,
    context: CallContext,
    schemas: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Return the rules arguments_0, arguments_1 and so on, one per schema."""
    rules: list[str] = []
    for i, (name, schema) in enumerate(zip(context.names, schemas, strict=True)):
        try:
            rules += syntax.arguments(context, f"arguments_{i}", schema)
        except ValueError as error:
            raise ParametersError(f"parameters of {name!r}: {error}") from None
    return rules
