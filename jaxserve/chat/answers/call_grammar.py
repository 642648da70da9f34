"""Grammars of answers that call functions: what a form writes, in llguidance's dialect of Lark."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.structure.worker import JSON_OPTIONS

ANY_TEXT = "/(?s:.*)/"


@dataclass(frozen=True)
class Calling:
    """What a form needs to write its rule of calls.

    names: of the functions that may be called. parallel: several calls may be made. special: ids of
    special tokens. Rule `arguments_i` is a JSON object that function i takes.
    """

    names: Sequence[str]
    parallel: bool
    special: Mapping[str, int]

    def mark(self, text: str) -> str:
        """A mark, as the one token that it may be."""
        return f"<[{self.special[text]}]>" if text in self.special else literal(text)

    def any_of(self, write: Callable[[str, str], str]) -> str:
        """One call, whichever: write(name, rule of its arguments)."""
        return (
            "("
            + " | ".join(write(name, f"arguments_{i}") for i, name in enumerate(self.names))
            + ")"
        )

    def objects(self, key: str) -> str:
        """One call as an object: {"name": "add", key: {...}}."""

        def write(name: str, rule: str) -> str:
            return f"{literal(f'{{"name": {json.dumps(name)}, "{key}": ')} {rule} {literal('}')}"

        return self.any_of(write)

    def joined(self, call: str, between: str) -> str:
        return f"{call} ({between} {call})*" if self.parallel else call


@dataclass(frozen=True)
class Writing:
    """How a form writes calls. opening: the mark before the first one; empty where there is none.
    rest: behind it.
    """

    opening: str
    rest: Callable[[Calling], str]


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def calls_alone(
    writing: Writing,
    calling: Calling,
    schemas: Sequence[Mapping[str, Any]],
    thought_end: str | None,
) -> str:
    """An answer that is calls, and nothing else. schemas: of the arguments, by function.

    thought_end: the mark behind the thought that the prompt has opened; None: it has not.
    """
    calls = [calling.mark(writing.opening)] if writing.opening else []
    calls.append(writing.rest(calling))
    rules = _arguments(schemas)
    if thought_end is not None:
        calls = ["thought", r"/\n{0,2}/", *calls]
        if thought_end in calling.special:
            rules += [f"thought: TEXT {calling.mark(thought_end)}", f"TEXT: {ANY_TEXT}"]
        else:
            rules.append(f"thought[lazy]: {ANY_TEXT} {literal(thought_end)}")
    return "\n".join([f"start: {' '.join(calls)}", *rules])


def text_and_calls(
    writing: Writing,
    calling: Calling,
    schemas: Sequence[Mapping[str, Any]],
    spoken: Collection[str],
) -> str:
    """An answer that is free until a call begins, and behind it. spoken: special tokens that its
    text may have.

    ValueError where nothing tells text and calls apart.
    """
    again = "*" if calling.parallel else "?"
    marks = [calling.mark(name) for name in spoken if name in calling.special]
    if writing.opening in calling.special:
        text = f"({' | '.join(['SOME', *marks])})*"
        start = f"start: text ({calling.mark(writing.opening)} calls text){again}"
        rules = [f"text: {text}", "SOME: /(?s:.+)/"]
    elif writing.opening and not marks:
        start = f"start: (opening calls){again} TEXT"
        rules = [f"opening[lazy]: {ANY_TEXT} {literal(writing.opening)}", f"TEXT: {ANY_TEXT}"]
    else:
        raise ValueError("no mark of its own stands before a call")
    return "\n".join([start, *rules, f"calls: {writing.rest(calling)}", *_arguments(schemas)])


def _arguments(schemas: Sequence[Mapping[str, Any]]) -> list[str]:
    given = [{**schema, "type": "object", "x-guidance": JSON_OPTIONS} for schema in schemas]
    return [
        f"arguments_{i}: %json {json.dumps(schema, ensure_ascii=False)}"
        for i, schema in enumerate(given)
    ]
