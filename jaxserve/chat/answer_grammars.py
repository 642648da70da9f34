"""Grammars that an answer to a conversation has to follow, by its tools and its thoughts."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.chat.answers import Reading, harmony
from jaxserve.chat.answers.call_grammar import (
    CallContext,
    Lead,
    ParametersError,
    calls_alone,
    calls_or_body,
    text_and_calls,
)
from jaxserve.chat.answers.thinking import MARKS, closed_by
from jaxserve.chat.answers.thought_grammar import lead_of_thought
from jaxserve.chat.tools import Tools
from jaxserve.errors import ChatError
from jaxserve.structure import Structure
from jaxserve.tokenizer import Tokenizer


class AnswerGrammars:
    """Writer of the grammars of answers, in a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def leads(self, prompt: str, reading: Reading) -> tuple[Lead, Lead]:
        """Return what comes before a structure, and before calls that the answer has to make."""
        context = self._context()
        if reading.channels:
            return harmony.before_text(context), harmony.before_calls(context)
        if not reading.thinks or closed_by(prompt):
            return Lead(), Lead()
        tokens = {**self._tokenizer.added_tokens, **self._tokenizer.special_tokens}
        lead = lead_of_thought(context, reading.opened, tokens)
        return lead, lead

    def structure(self, tools: Tools | None, reading: Reading, frame: str) -> Structure | None:
        """Return the grammar of an answer that must call, or must call strictly; otherwise None."""
        if tools is None or reading.tools is None or not reading.certain:
            return None
        context, given = self._callable(tools, reading)
        syntax = reading.tools.syntax
        try:
            if tools.required:
                return Structure("lark", calls_alone(syntax, context, given), "tools", frame)
            # Where a thought comes before the text, its marks are not in it.
            text_tokens = MARKS if reading.thinks and not frame else ()
            grammar = text_and_calls(syntax, context, given, text_tokens)
            return Structure("lark", grammar, "tools", frame)
        except ParametersError as error:
            problem = (
                "this model writes arguments as text, which cannot be made to follow all schemas: "
                f'{error} (leave out "strict", and choose "auto")'
            )
            raise ChatError(problem, "tools") from None
        except ValueError as error:
            problem = (
                "this model's format allows strict calls with tool_choice only: "
                f'{error} (choose "required" or one function)'
            )
            raise ChatError(problem, "tools") from None

    def frame(
        self, tools: Tools | None, reading: Reading, before_text: Lead, before_calls: Lead
    ) -> str | None:
        """Return the grammar around a structure that the answer may have, see chat.Rendered."""
        if tools is None or reading.tools is None:
            return before_text.frame
        syntax = reading.tools.syntax
        has_mark = bool(syntax.opening) or reading.channels
        if tools.required or not has_mark:
            return None
        context, given = self._callable(tools, reading)
        try:
            return calls_or_body(syntax, context, given, before_calls, before_text)
        except ParametersError:  # told by structure: only strict functions have such schemas
            return None

    def _callable(
        self, tools: Tools, reading: Reading
    ) -> tuple[CallContext, list[Mapping[str, Any]]]:
        """Return the functions that calls may be of, with the schemas that these have to follow."""
        schemas = dict(reading.functions)
        if tools.required:
            schemas = {name: each for name, each in schemas.items() if name in tools.required}
        else:
            schemas = {name: each if name in tools.strict else {} for name, each in schemas.items()}
        return self._context(list(schemas), tools.parallel), list(schemas.values())

    def _context(self, names: Sequence[str] = (), parallel: bool = True) -> CallContext:
        return CallContext(names, parallel, self._tokenizer.special_tokens)
