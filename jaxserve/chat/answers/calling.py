"""Grammars of answers that have to call a function: what a form writes, in llguidance's dialect of Lark."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.structure.worker import JSON_OPTIONS


@dataclass(frozen=True)
class Calling:
    """What a form needs to write its rule of an answer.

    names: of the functions that may be called. parallel: several calls may be made. special: ids of special tokens.
    Rule `arguments_i` is the JSON object that the schema of function i allows.
    """

    names: Sequence[str]
    parallel: bool
    special: Mapping[str, int]

    def mark(self, text: str) -> str:
        """A mark, as the one token that it may be."""
        return f"<[{self.special[text]}]>" if text in self.special else literal(text)

    def any_of(self, write: Callable[[str, str], str]) -> str:
        """One call, whichever: write(name, rule of its arguments)."""
        return "(" + " | ".join(write(name, f"arguments_{i}") for i, name in enumerate(self.names)) + ")"

    def objects(self, key: str) -> str:
        """One call as an object: {"name": "add", key: {...}}."""
        return self.any_of(
            lambda name, rule: f"{literal(f'''{{"name": {json.dumps(name)}, "{key}": ''')} {rule} {literal('}')}"
        )

    def joined(self, call: str, separator: str) -> str:
        return f"{call} ({literal(separator) if separator else ''} {call})*" if self.parallel else call


def grammar_of_calls(
    answer: Callable[[Calling], str],
    functions: Sequence[Mapping[str, Any]],
    parallel: bool,
    special: Mapping[str, int],
    thought_end: str | None,
) -> str:
    """Lark of a whole answer. functions: name and parameters, a JSON schema.

    thought_end: what a thought ends with, where the prompt has opened one.
    """
    calling = Calling([function["name"] for function in functions], parallel, special)
    rules = [f"arguments_{i}: %json {_schema(function['parameters'])}" for i, function in enumerate(functions)]
    if thought_end is None:
        return "\n".join([f"start: {answer(calling)}", *rules])
    if thought_end in special:
        rules += [f"thought: ANYTHING {calling.mark(thought_end)}", "ANYTHING: /(?s:.*)/"]
    else:
        rules.append(f"thought[lazy]: /(?s:.*)/ {literal(thought_end)}")
    return "\n".join([f"start: thought /\\n{{0,2}}/ {answer(calling)}", *rules])


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema(parameters: Mapping[str, Any]) -> str:
    return json.dumps({**parameters, "type": "object", "x-guidance": JSON_OPTIONS}, ensure_ascii=False)
