"""Trial of a chat template on a short conversation, before any client sends one."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.chat.errors import NoTemplateError, RefusedByTemplateError
from jaxserve.errors import ChatError, RequestError, flag_text

if TYPE_CHECKING:
    from jaxserve.chat.chat import Chat

WORD = "Hello"
CONVERSATION = ({"role": "user", "content": WORD},)
CHOSEN_ELSEWHERE = ("auto", "none")  # parsers that name no format


@dataclass(frozen=True)
class Trial:
    """Outcome of a template's trial.

    problem: why no conversation can be answered; None where some can. notes: lines on conversations
    or fields that will be refused.
    """

    problem: str | None = None
    notes: tuple[str, ...] = ()


def try_template(chat: "Chat", file: Path | None, tool_parser: str) -> Trial:
    """Return what comes of rendering a conversation of one message.

    file: the template's own file, which has to render it; the template of a model's folder may be
    made for other conversations alone. tool_parser: format of calls that the operator chose.
    """
    try:
        chat.template  # noqa: B018 (it is read)
    except NoTemplateError as error:
        if tool_parser in CHOSEN_ELSEWHERE:
            return Trial(notes=(f"{error.problem}; until then, conversations are refused",))
        return Trial(flag_text("--tool-parser", tool_parser, error.problem))
    except ChatError as error:
        return Trial(_about(chat, file, error.problem))
    note = None
    try:
        rendered = chat.render(CONVERSATION).text
    except RefusedByTemplateError as error:
        note = f"a conversation of one user's message alone is refused: {error.problem}"
    except RequestError as error:
        return Trial(_about(chat, file, error.problem))
    else:
        if WORD not in rendered:
            note = "the chat template does not write what a user says"
            if file:
                return Trial(_about(chat, file, note))
    return _with_tools(chat, tool_parser, note)


def _with_tools(chat: "Chat", tool_parser: str, note: str | None) -> Trial:
    """Return the trial of a template that renders: with `note`, and what it says of tools."""
    notes = (note,) if note else ()
    if chat.takes_tools:
        if chat.formats.tools is None and tool_parser == "auto":
            notes += (
                "the chat template takes tools, but the format of this model's calls is not known "
                "(--tool-parser names it): requests with tools are refused",
            )
        return Trial(notes=notes)
    if tool_parser in CHOSEN_ELSEWHERE:
        return Trial(notes=notes)
    problem = "the chat template takes no tools (leave it out, or give another --chat-template)"
    return Trial(flag_text("--tool-parser", tool_parser, problem))


def _about(chat: "Chat", file: Path | None, problem: str) -> str:
    """Return a problem of the template as an error of the flag, or of the model's folder."""
    if file:
        return flag_text("--chat-template", file, problem)
    return f"{chat.folder}: {problem} (--chat-template FILE gives another)"
