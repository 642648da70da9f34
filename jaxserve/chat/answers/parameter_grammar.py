"""Grammars of arguments that a model writes one by one, as text and not as JSON."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.chat.answers.call_grammar import ANY_TEXT, CallContext, json_rule, literal
from jaxserve.chat.answers.text_patterns import expression_of
from jaxserve.chat.answers.value_forms import Fixed, Form, Json, Text, ValueForms

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


class _Arguments:
    """Rules of one function's arguments while they are written."""

    def __init__(
        self, syntax: ParameterSyntax, context: CallContext, rule: str, schema: Mapping[str, Any]
    ) -> None:
        self._syntax = syntax
        self._context = context
        self._rule = rule
        self._root = schema
        self._forms = ValueForms(schema)

    def rules(self) -> list[str]:
        """Return all rules."""
        self._forms.check_object()
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
        forms = list(self._forms.of({} if schema is True else schema))
        if not forms:
            raise ValueError("allows no value")
        if any(isinstance(form, Text) for form in forms):
            # Values of other types would be read as text.
            return [self._syntax.closed(self._context, rule, self._texts(forms))]
        rules: list[str] = []
        for i, form in enumerate(forms):
            rules += self._one(f"{rule}_{i}", form)
        choices = " | ".join(f"{rule}_{i}" for i in range(len(forms)))
        return [f"{rule}: {choices}", *rules]

    def _texts(self, forms: Sequence[Form]) -> str:
        """Return the expression of all forms that are text, and of the margin behind them."""
        margin = self._syntax.margin
        found: list[str] = []
        for form in {repr(form): form for form in forms}.values():  # references repeat them
            match form:
                case Text(schema):
                    found.append(expression_of(schema, margin, self._syntax.closing))
                case Fixed(text):
                    found.append(literal(self._without_mark(text) + margin))
                case Json():
                    pass
        # All in one, for what is read as one: of two expressions, the longer match would win.
        return ANY_TEXT if ANY_TEXT in found else f"({' | '.join(found)})"

    def _one(self, rule: str, form: Form) -> list[str]:
        """Return the rules of a form of a value that is no free text, and of the mark behind it."""
        assert not isinstance(form, Text)
        end = self._context.mark(self._syntax.closing)
        if self._syntax.margin:
            end = f"{literal(self._syntax.margin)} {end}"
        if isinstance(form, Fixed):
            text = self._without_mark(form.text)
            return [f"{rule}: {literal(text)} {end}" if text else f"{rule}: {end}"]
        return [f"{rule}: {rule}_json {end}", json_rule(f"{rule}_json", form.schema)]

    def _without_mark(self, text: str) -> str:
        if self._syntax.closing in text:
            raise ValueError(f"has a value with {self._syntax.closing}")
        return text
