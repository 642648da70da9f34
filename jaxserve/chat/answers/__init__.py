"""Parsing of answers into reasoning, content and tool calls; pure functions of the text, no jax."""

from jaxserve.chat.answers.events import Arguments, Call, Content, Part, Reasoning
from jaxserve.chat.answers.formats import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    AnswerFormats,
    choose_formats,
)
from jaxserve.chat.answers.parser import Answer, AnswerParser, Reading, ended_by

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Answer",
    "AnswerFormats",
    "AnswerParser",
    "Arguments",
    "Call",
    "Content",
    "Part",
    "Reading",
    "Reasoning",
    "choose_formats",
    "ended_by",
]
