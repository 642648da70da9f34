"""Prompts of conversations: their text, and token ids in which only the template marks turns."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxserve.chat.answers import AnswerFormats, Reading, choose_formats
from jaxserve.chat.answers.call_grammar import CallContext, calls_alone, text_and_calls
from jaxserve.chat.answers.thinking import CLOSE, MARKS, opened_by
from jaxserve.chat.marking import Marker, lowered
from jaxserve.chat.marks import is_mark_like, notes_on_marks
from jaxserve.chat.messages import plain_messages
from jaxserve.chat.renderer import SECONDS, Look, TemplateRenderer
from jaxserve.chat.source import ChatTemplate, read_template
from jaxserve.chat.tools import Tools, with_arguments
from jaxserve.chat.trial import Trial, try_template
from jaxserve.errors import ChatError, ConfigError, RequestError
from jaxserve.structure import Structure
from jaxserve.tokenizer import MARK, Tokenizer, TokenizerError
from jaxserve.tokenizer.special import NO_WORD

CONTENT_ONLY = Reading()
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(frozen=True)
class Rendered:
    """Prompt of a conversation, up to where the answer begins.

    `reading` says how the answer is parsed, `structure` what it has to follow where functions must
    be called or called strictly; None leaves it free.
    """

    text: str
    token_ids: tuple[int, ...]
    reading: Reading = CONTENT_ONLY
    structure: Structure | None = None


class Chat:
    """Chat template and tokenizer of one checkpoint folder; for use from several threads.

    Names of special tokens become their ids where the template writes them, and stay text where a
    client writes them. Added tokens that are not marked special are treated likewise if the
    template's source has them (DeepSeek marks its turns that way), or the files of the tokenizer
    call them the template's own. Only in answers of the assistant those stay tokens that the
    template looks for, as for </think>.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        template_file: Path | None = None,
        seconds: float = SECONDS,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        """Prepare to render; the template is read, and the process started, with the first use.

        `template_file` replaces the folder's template. `seconds` bounds one rendering. For
        `tool_parser` and `reasoning_parser` see choose_formats.
        """
        self.folder = folder
        self._tokenizer = tokenizer
        self._file = template_file
        self._parsers = (tool_parser, reasoning_parser)
        self._renderer = TemplateRenderer(seconds)

    @cached_property
    def template(self) -> ChatTemplate:
        """The template; NoTemplateError where there is none, ChatError if it cannot be read."""
        return read_template(self.folder, self._tokenizer, self._file)

    def check(self) -> None:
        """Raise ConfigError where no conversation can be answered, or no tool call be read.

        A folder without a template is no error, unless a format of calls was chosen for it.
        """
        if problem := self._trial.problem:
            raise ConfigError(problem)

    @cached_property
    def _trial(self) -> Trial:
        return try_template(self, self._file, self._parsers[0])

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Lines on what will be refused, and on marks that are not read as tokens."""
        try:
            marks = notes_on_marks(self.template, self._tokenizer)
        except ChatError:
            marks = ()
        return self._trial.notes + marks

    @cached_property
    def formats(self) -> AnswerFormats:
        """Formats of the answers; ChatError is raised when there is no template."""
        return choose_formats(self.template.source, *self._parsers)

    @property
    def takes_tools(self) -> bool:
        """Return whether the template uses the tools of a request."""
        return self._look.takes_tools

    @cached_property
    def _look(self) -> Look:
        return self._renderer.look(self.template.source)

    @cached_property
    def _names(self) -> frozenset[str]:
        """Names of added tokens that are the template's, without those of special tokens."""
        source = lowered("\0".join((self.template.source, *self._look.words)))
        added = self._tokenizer.added_tokens.keys()
        written = {name for name in added if lowered(name) in source and NO_WORD.search(name)}
        marks = {name for name in added if is_mark_like(name)}  # joined of pieces, perhaps
        return frozenset(written | marks | (self.template.control_tokens & added))

    @property
    def _missing(self) -> frozenset[str]:
        """Names of tokens that the model does not have.

        A template that writes one is refused, and no client may make it seem to.
        """
        return frozenset(filter(NO_WORD.search, self._tokenizer.missing_tokens))

    @cached_property
    def _marker(self) -> Marker:
        names = self._names | self._missing | self._tokenizer.special_tokens.keys()
        return Marker(names, self._look.words | ROLES, self._look.attributes)

    @cached_property
    def _answer_marker(self) -> Marker:
        """Marker of the assistant's messages, in which a template finds where thoughts end."""
        look = self._look
        unsought = (self._names | self._missing) - look.sought
        names = unsought | self._tokenizer.special_tokens.keys()
        return Marker(names, look.words | ROLES, look.attributes)

    def _marked(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with marks in the names of tokens that a client wrote."""
        markers = {"assistant": self._answer_marker}
        return [markers.get(turn["role"], self._marker).marked(turn) for turn in messages]

    def render(
        self, messages: object, name: str = "messages", tools: Tools | None = None
    ) -> Rendered:
        """Return the prompt for the assistant's next message.

        `messages` is a list of {"role": ..., "content": ...}, `name` its path in the request, and
        `tools` what the answer may call. RequestError is raised for malformed messages, ChatError
        where the template refuses them or takes no tools.
        """
        if tools:
            self._check_tools()
        plain = with_arguments(plain_messages(messages, name), self._look.joins_arguments, name)
        variables = {
            "messages": self._marked(plain),
            # None and not an empty list: templates ask whether tools are none.
            "tools": self._marker.marked(list(tools.offered)) if tools else None,
            "documents": None,
            "add_generation_prompt": True,
        }
        text = self._renderer.render(self.template.source, self.template.tokens | variables)
        try:
            ids = self._tokenizer.encode_special(text)
        except TokenizerError as error:
            raise RequestError(name, str(error)) from None
        # The marks have done their work once the ids exist; the text is for people.
        text = text.replace(MARK, "")
        reading = self._reading(text, tools)
        return Rendered(text, tuple(ids), reading, self._structure(tools, reading))

    def _check_tools(self) -> None:
        """Raise ChatError where the template takes no tools, or calls could not be parsed."""
        if not self._look.takes_tools:
            where = self._file or self.folder
            raise ChatError(
                f"the chat template of {where.name} takes no tools; "
                "give another one with --chat-template",
                "tools",
            )
        if self.formats.tools is None:
            problem = (
                "the format of this model's calls is not known, or turned off; "
                "the server's --tool-parser names it"
            )
            raise ChatError(problem, "tools")

    def _reading(self, prompt: str, tools: Tools | None) -> Reading:
        """Return how the answer to a prompt with these tools is parsed."""
        formats = self.formats
        marks: tuple[str, ...] = ()
        if tools and formats.tools:
            marks += formats.tools.marks
        if formats.thinks:
            marks += MARKS
        special = self._tokenizer.special_tokens
        return Reading(
            tools=formats.tools if tools else None,
            names=tools.names if tools else frozenset(),
            parallel=tools is None or tools.parallel,
            thinks=formats.thinks,
            opened=formats.thinks and opened_by(prompt),
            spelled={special[mark]: mark for mark in marks if mark in special},
        )

    def _structure(self, tools: Tools | None, reading: Reading) -> Structure | None:
        """Return the grammar of an answer that must call, or must call strictly; otherwise None."""
        if tools is None or reading.tools is None or not (tools.required or tools.strict):
            return None
        functions = [tool["function"] for tool in tools.offered]
        if tools.required:
            functions = [function for function in functions if function["name"] in tools.required]
        names = [function["name"] for function in functions]
        context = CallContext(names, tools.parallel, self._tokenizer.special_tokens)
        syntax = reading.tools.syntax
        if tools.required:
            schemas = [function["parameters"] for function in functions]
            thought_end = CLOSE if reading.opened else None
            return Structure("lark", calls_alone(syntax, context, schemas, thought_end), "tools")
        schemas = [f["parameters"] if f["name"] in tools.strict else {} for f in functions]
        try:
            text_tokens = MARKS if reading.thinks else ()
            return Structure("lark", text_and_calls(syntax, context, schemas, text_tokens), "tools")
        except ValueError as error:
            problem = (
                "ask for strict calls, which this model's format allows with tool_choice only: "
                f'{error} (choose "required" or one function)'
            )
            raise ChatError(problem, "tools") from None

    def close(self) -> None:
        """End the rendering process; a later use starts another."""
        self._renderer.close()
