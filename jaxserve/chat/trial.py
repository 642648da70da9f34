"""Trial of a chat template on short conversations, before any client sends one."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.chat.errors import LeftOutError, NoTemplateError, RefusedByTemplateError
from jaxserve.errors import ChatError, RequestError
from jaxserve.flag_errors import flag_text

if TYPE_CHECKING:
    from jaxserve.chat.chat import Chat

WORD = "Hello"
CONVERSATIONS = (
    [{"role": "user", "content": WORD}],
    [{"role": "system", "content": WORD}, {"role": "user", "content": WORD}],
)
CHOSEN_ELSEWHERE = ("auto", "none")  # parsers that name no format


@dataclass(frozen=True)
class Trial:
    """Outcome of a template's trial."""

    problem: str | None = None  # reason why no conversation can be answered; None where some can
    notes: tuple[str, ...] = ()  # lines on conversations or fields that will be refused


def try_template(chat: "Chat", file: Path | None, tool_parser: str) -> Trial:
    """Return what comes of rendering two short conversations.

    Args:
        file: The template's own file, which has to render one of the conversations. The template of
            a model's folder only has to be Jinja: it may be made for other conversations, or the
            model for none at all.
        tool_parser: Format of calls that the operator chose.
    """
    try:
        for template in (chat.default, chat.with_tools):
            template.takes_tools  # noqa: B018 (the template is read and parsed)
    except NoTemplateError as error:
        if tool_parser in CHOSEN_ELSEWHERE:
            return Trial(notes=(f"{error.problem}; until then, conversations are refused",))
        return Trial(flag_text("--tool-parser", tool_parser, error.problem))
    except ChatError as error:
        return Trial(_about(chat, file, error.problem))
    failures = [_failure(chat, conversation) for conversation in CONVERSATIONS]
    first = failures[0]
    suits_some = None in failures or any(failure and failure.is_refusal for failure in failures)
    if first and file and not suits_some:
        return Trial(_about(chat, file, first.problem))
    note = f"a conversation of one user's message fails: {first.problem}" if first else None
    return _with_tools(chat, tool_parser, note)


@dataclass(frozen=True)
class _Failure:
    """Reason why a conversation is not rendered."""

    problem: str
    is_refusal: bool = False  # the template itself refuses the conversation


def _failure(chat: "Chat", conversation: list[dict[str, str]]) -> _Failure | None:
    """Return why a conversation cannot be answered; None if it can."""
    try:
        chat.render(conversation)
    except LeftOutError:
        return _Failure("the chat template does not write what a user says")
    except ChatError as error:
        return _Failure(error.problem, isinstance(error, RefusedByTemplateError))
    except RequestError as error:
        return _Failure(f"what it renders {error.problem}")
    return None


def _with_tools(chat: "Chat", tool_parser: str, note: str | None) -> Trial:
    """Return the trial of a template that renders: with `note`, and what it says of tools."""
    notes = (note,) if note else ()
    if chat.with_tools.takes_tools:
        if chat.with_tools.formats.tools is None and tool_parser == "auto":
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
    where = file or chat.folder
    if file and not problem.startswith(str(where)):
        return flag_text("--chat-template", file, problem)
    if file:
        return f"--chat-template: {problem}"
    named = problem if problem.startswith(str(where)) else f"{where}: {problem}"
    return f"{named} (--chat-template FILE gives another)"
