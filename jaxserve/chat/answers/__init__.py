"""Answers taken apart: what a model thinks, says and calls. Pure functions of the text. No jax in here."""

from jaxserve.chat.answers.forms import REASONING_PARSERS, TOOL_PARSERS, Forms, choose_forms
from jaxserve.chat.answers.parser import Answer, AnswerParser, Reading, ended_by
from jaxserve.chat.answers.parts import Arguments, Call, Content, Part, Reasoning

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Answer",
    "AnswerParser",
    "Arguments",
    "Call",
    "Content",
    "Forms",
    "Part",
    "Reading",
    "Reasoning",
    "choose_forms",
    "ended_by",
]
