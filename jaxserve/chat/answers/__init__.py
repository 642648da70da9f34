"""Answers taken apart: what a model thinks, says and calls. Pure functions of the text. No jax in
here.
"""

from jaxserve.chat.answers.events import Arguments, Call, Content, Part, Reasoning
from jaxserve.chat.answers.formats import REASONING_PARSERS, TOOL_PARSERS, Forms, choose_forms
from jaxserve.chat.answers.parser import Answer, AnswerParser, Reading, ended_by

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
