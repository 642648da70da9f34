"""Prompts of conversations: their text, and token ids in which only the template marks turns."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxserve.chat.answer_grammars import AnswerGrammars
from jaxserve.chat.answers import AnswerFormats, Reading, harmony
from jaxserve.chat.answers.thinking import MARKS, closed_by, opened_by
from jaxserve.chat.guarded_template import Given, GuardedTemplate
from jaxserve.chat.marks import notes_on_marks
from jaxserve.chat.messages import plain_messages
from jaxserve.chat.renderer import SECONDS, TemplateRenderer
from jaxserve.chat.source import ChatTemplate, ChatTemplates, read_templates
from jaxserve.chat.template_options import TemplateOptions, UnknownFields
from jaxserve.chat.template_variables import BUDGETS, Chosen
from jaxserve.chat.thought_tokens import FIELD as BUDGET
from jaxserve.chat.thought_tokens import budget_in_channels, budget_of
from jaxserve.chat.tools import Tools
from jaxserve.chat.trial import Trial, try_template
from jaxserve.errors import ChatError, ConfigError, RequestError
from jaxserve.request import ThoughtBudget
from jaxserve.structure import Structure
from jaxserve.tokenizer import MARK, Tokenizer, TokenizerError

CONTENT_ONLY = Reading()
NO_OPTIONS = TemplateOptions()


@dataclass(frozen=True)
class Rendered:
    """Prompt of a conversation, up to where the answer begins.

    `reading` says how the answer is parsed, `structure` what it has to follow where functions must
    be called or called strictly; None leaves it free. `frame` is the grammar around any other
    structure, see Structure.frame: of a thought before it, and of calls in its place. It is None
    where there is no place for one. `unread` are keys of messages that changed nothing and that
    OpenAI's API does not have, and options of which the template reads no variable.
    """

    text: str
    token_ids: tuple[int, ...]
    reading: Reading = CONTENT_ONLY
    structure: Structure | None = None
    frame: str | None = ""
    thought_budget: ThoughtBudget | None = None
    unread: tuple[str, ...] = ()


class Chat:
    """Chat template and tokenizer of one checkpoint folder; for use from several threads.

    Names of special tokens become their ids where the template writes them, and stay text where a
    client writes them; see GuardedTemplate.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        template_file: Path | None = None,
        seconds: float = SECONDS,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        unknown_fields: UnknownFields = "ignore",
    ) -> None:
        """Prepare to render; the template is read, and the process started, with the first use.

        `template_file` replaces the folder's template. `seconds` bounds one rendering. For
        `tool_parser` and `reasoning_parser` see choose_formats. `unknown_fields` says what becomes
        of options of which the template reads no variable.
        """
        self.folder = folder
        self._tokenizer = tokenizer
        self._file = template_file
        self._parsers = (tool_parser, reasoning_parser)
        self.unknown_fields: UnknownFields = unknown_fields
        self._grammars = AnswerGrammars(tokenizer)
        self._renderer = TemplateRenderer(seconds)

    @cached_property
    def templates(self) -> ChatTemplates:
        """The templates; NoTemplateError where there is none, ChatError if one cannot be read."""
        return read_templates(self.folder, self._tokenizer, self._file)

    @property
    def template(self) -> ChatTemplate:
        """The template of conversations without tools; errors as `templates`."""
        return self.templates.default

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
            templates = self.templates
        except ChatError:
            return self._trial.notes
        lines = [*templates.notes, *self._trial.notes]
        for template in templates.all:
            lines += notes_on_marks(template, self._tokenizer)
        return tuple(dict.fromkeys(lines))

    @cached_property
    def default(self) -> GuardedTemplate:
        """The template of conversations without tools, in use; errors as `templates`."""
        return self._guarded(self.templates.default)

    @cached_property
    def with_tools(self) -> GuardedTemplate:
        """The template of conversations with tools, in use; errors as `templates`."""
        chosen = self.templates.with_tools
        return self._guarded(chosen) if chosen else self.default

    def _guarded(self, template: ChatTemplate) -> GuardedTemplate:
        return GuardedTemplate(
            template, self.templates.all, self._tokenizer, self._renderer, *self._parsers
        )

    def render(
        self,
        messages: object,
        name: str = "messages",
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        options: TemplateOptions = NO_OPTIONS,
    ) -> Rendered:
        """Return the prompt for the assistant's next message.

        `messages` is a list of {"role": ..., "content": ...}, `name` its path in the request,
        `tools` what the answer may call, and `options` how it is thought out. Without
        `add_generation_prompt` it is the conversation so far. RequestError is raised for malformed
        messages and options, ChatError where the template refuses them or takes no tools.
        """
        template = self.with_tools if tools else self.default
        if tools:
            self._check_tools()
        plain = plain_messages(messages, name)
        chosen = self._chosen(template, options)
        given = Given(tools, chosen.variables, add_generation_prompt)
        turns = template.render(plain, name, given)
        unread = template.unread_keys(plain, name, given, turns) if add_generation_prompt else ()
        try:
            ids = self._tokenizer.encode_special(turns.text)
        except TokenizerError as error:
            raise RequestError(name, f"cannot be tokenized: {error}") from None
        # The marks have done their work once the ids exist; the text is for people.
        text = turns.text.replace(MARK, "")
        reading = self._reading(text, tools, template.formats)
        before_text, before_calls = self._grammars.leads(text, reading)
        return Rendered(
            text,
            tuple(ids),
            reading,
            structure=self._grammars.structure(tools, reading, before_calls.frame),
            frame=self._grammars.frame(tools, reading, before_text, before_calls),
            thought_budget=self._budget(options, text, reading),
            unread=(*unread, *chosen.ignored),
        )

    def _chosen(self, template: GuardedTemplate, options: TemplateOptions) -> Chosen:
        """Return the variables that options become; ChatError for one that is to be refused."""
        if options == NO_OPTIONS:
            return Chosen({}, ())
        chosen = template.choose(options)
        bounded = template.formats.thinks or any(name in chosen.variables for name in BUDGETS)
        if options.thinking_budget is not None and not bounded:
            chosen = Chosen(chosen.variables, (*chosen.ignored, BUDGET))
        if chosen.ignored and self.unknown_fields == "error":
            where = self._file or self.folder
            problem = f"has no effect: the chat template of {where.name} does not heed it"
            raise ChatError(f"{problem} (leave it out)", chosen.ignored[0])
        return chosen

    def _budget(
        self, options: TemplateOptions, prompt: str, reading: Reading
    ) -> ThoughtBudget | None:
        """Return the bound of the thought that the answer begins with; None where it has none."""
        tokens = options.thinking_budget
        if tokens is None or not reading.thinks or closed_by(prompt):
            return None
        if reading.channels:
            return budget_in_channels(tokens, bool(reading.names), self._tokenizer)
        return budget_of(tokens, reading.opened, self._tokenizer)

    def _check_tools(self) -> None:
        """Raise ChatError where the template takes no tools, or calls could not be parsed."""
        if not self.with_tools.takes_tools:
            where = self._file or self.folder
            raise ChatError(
                f"the chat template of {where.name} takes no tools; "
                "give another one with --chat-template",
                "tools",
            )
        if self.with_tools.formats.tools is None:
            problem = (
                "the format of this model's calls is not known, or turned off; "
                "the server's --tool-parser names it"
            )
            raise ChatError(problem, "tools")

    def _reading(self, prompt: str, tools: Tools | None, formats: AnswerFormats) -> Reading:
        """Return how the answer to a prompt with these tools is parsed."""
        marks: tuple[str, ...] = ()
        if tools and formats.tools:
            marks += formats.tools.marks
        if formats.channels:
            marks += harmony.MARKS
        elif formats.thinks:
            marks += MARKS
        special = self._tokenizer.special_tokens
        return Reading(
            tools=formats.tools if tools else None,
            functions=_schemas(tools) if tools else {},
            parallel=tools is None or tools.parallel,
            thinks=formats.thinks,
            opened=formats.thinks and not formats.channels and opened_by(prompt),
            channels=formats.channels,
            spelled={special[mark]: mark for mark in marks if mark in special},
            # The grammar of AnswerGrammars.structure sees to that.
            certain=bool(tools and formats.tools and (tools.required or tools.strict)),
        )

    def close(self) -> None:
        """End the rendering process; a later use starts another."""
        self._renderer.close()


def _schemas(tools: Tools) -> Mapping[str, Mapping[str, Any]]:
    """Return the functions that may be called, with the schemas that their parameters follow."""
    functions = [tool["function"] for tool in tools.offered]
    shown = {f["name"]: f["parameters"] for f in functions if f["name"] in tools.names}
    return {name: tools.followed.get(name, parameters) for name, parameters in shown.items()}
