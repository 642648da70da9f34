"""A chat template whose marks of turns no client can write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxserve.chat.answers import AnswerFormats, choose_formats
from jaxserve.chat.earlier_thoughts import GIVEN, has_other_key, with_thoughts
from jaxserve.chat.errors import LeftOutError, RefusedByTemplateError
from jaxserve.chat.marking import Marker, lowered
from jaxserve.chat.marks import is_mark_like
from jaxserve.chat.messages import OF_THE_MODEL
from jaxserve.chat.renderer import Look, TemplateRenderer
from jaxserve.chat.source import ChatTemplate
from jaxserve.chat.template_options import TemplateOptions
from jaxserve.chat.template_variables import (
    NO_THOUGHT,
    Chosen,
    effort_for,
    neighbours,
    of_effort,
    of_switch,
    says_no_thought,
    variables_for,
)
from jaxserve.chat.tools import Tools, with_arguments
from jaxserve.chat.traces import left_out
from jaxserve.chat.turns import DEVELOPER, SYSTEM, TOOL, USER, Turns, forms
from jaxserve.errors import ChatError, RequestError
from jaxserve.tokenizer import Tokenizer
from jaxserve.tokenizer.special import NO_WORD

# Keys of OpenAI's messages that nobody misses in a prompt. Those of its answers that say something
# (refusal, audio, function_call) are missed.
KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "annotations"})
ROLES = frozenset({SYSTEM, DEVELOPER, USER, OF_THE_MODEL, TOOL})
SHORT = [{"role": USER, "content": "Hello"}]  # conversation by which efforts are tried


@dataclass(frozen=True)
class Given:
    """Variables of a template beside the messages.

    Attributes:
        tools: Functions that the answer may call.
        variables: Further variables of the template, as clients wrote them.
        add_generation_prompt: Whether the assistant's turn is opened.
    """

    tools: Tools | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True


@dataclass(frozen=True)
class RenderedTurns:
    """Text of a conversation with marks in what clients wrote, and the turns that it is of."""

    text: str
    turns: Turns


class GuardedTemplate:
    """One template with a tokenizer; what clients write gets marks before it is rendered.

    Names of special tokens stay text where a client writes them. Added tokens that are not marked
    special are treated likewise if the template's source has them (DeepSeek marks its turns that
    way), or the files of the tokenizer call them the template's own. Only in answers of the
    assistant those stay tokens that the template looks for, as for </think>.
    """

    def __init__(
        self,
        template: ChatTemplate,
        beside: Sequence[ChatTemplate],
        tokenizer: Tokenizer,
        renderer: TemplateRenderer,
        tool_parser: str,
        reasoning_parser: str,
    ) -> None:
        """Prepare to render; for `tool_parser` and `reasoning_parser` see choose_formats.

        `beside` are all templates of the model: what one of them marks its turns with, no client
        may write in a conversation of another one.
        """
        self._template = template
        self._beside = beside
        self._tokenizer = tokenizer
        self._renderer = renderer
        self.formats: AnswerFormats = choose_formats(template.source, tool_parser, reasoning_parser)
        self._efforts: dict[tuple[str, ...], str | None] = {}  # those that are taken, of several

    @property
    def takes_tools(self) -> bool:
        """Return whether the template uses the tools of a request."""
        return self._look.takes_tools

    def choose(self, options: TemplateOptions) -> Chosen:
        """Return the variables that options of an answer become.

        In place of an effort that the template refuses stands the nearest one that it takes.
        RequestError is raised for a name of a special token among the client's variables.
        """
        for name in options.chat_template_kwargs.keys() & self._template.tokens.keys():
            problem = "is set by the server (leave it out)"
            raise RequestError(f"chat_template_kwargs.{name}", problem)
        no_thought = self._taken(NO_THOUGHT) if says_no_thought(self._look) else None
        effort = effort_for(options, self._look, no_thought)
        if effort is not None:
            effort = self._taken((effort, *neighbours(effort))) or effort
        return variables_for(options, self._look, effort, no_thought)

    def _taken(self, words: tuple[str, ...]) -> str | None:
        """Return the first of some words that the template takes as an effort; None without."""
        if words not in self._efforts:
            try:
                self._efforts[words] = next(filter(self._takes, words), None)
            except ChatError:  # it says nothing of the effort, and may be gone the next time
                return words[0]
        return self._efforts[words]

    def _takes(self, effort: str) -> bool:
        """Return whether the template does not refuse an effort; ChatError where it fails."""
        told = dict(of_effort(effort, self._look))
        variables = self._variables(Given(variables=dict(of_switch(True, self._look)) | told))
        try:
            self._text(self._marked(SHORT), variables)
        except RefusedByTemplateError:
            return False
        return True

    def render(self, messages: Turns, name: str, given: Given) -> RenderedTurns:
        """Return the text of a conversation, with marks in what clients wrote.

        `messages` are plain messages, `name` their path in the request. Where the template refuses
        them or leaves one out, it gets them in other forms (see turns.forms). RequestError is
        raised for arguments of calls that the template cannot use, ChatError where it fails, or
        takes them in no form.
        """
        variables = self._variables(given)
        turns = with_thoughts(self._with_known_roles(messages), self._read, self.formats.channels)
        tries = forms(turns, self._read)
        try:
            return self._whole(next(tries), name, variables)
        except (LeftOutError, RefusedByTemplateError) as error:
            problem: ChatError = error
        for form in tries:
            try:
                return self._whole(form, name, variables)
            except RefusedByTemplateError as error:
                # Of turns in order a template refuses what is really wrong with them.
                problem = problem if isinstance(problem, LeftOutError) else error
            except ChatError:
                continue
        raise problem

    def _variables(self, given: Given) -> dict[str, Any]:
        """Return the variables of the template beside the messages."""
        mark = self._marker.marked
        return {
            "documents": None,
            **{name: mark(value) for name, value in given.variables.items()},
            **self._template.tokens,
            # None and not an empty list: templates ask whether tools are none.
            "tools": mark(list(given.tools.offered)) if given.tools else None,
            "add_generation_prompt": given.add_generation_prompt,
        }

    def _whole(self, turns: Turns, name: str, variables: Mapping[str, Any]) -> RenderedTurns:
        """Return the text of a conversation; LeftOutError if a message is not in it."""
        shown = self._shown(turns, name)
        text = self._text(shown, variables)
        missed = left_out(turns, shown, text, lambda other: self._text(other, variables))
        if missed is not None:
            role = turns[missed]["role"]
            raise LeftOutError(
                f"the chat template leaves this message of role {role!r:.80} out of the prompt",
                f"{name}[{missed}].content",
            )
        return RenderedTurns(text, turns)

    def _shown(self, turns: Turns, name: str) -> list[Mapping[str, Any]]:
        """Return the messages as the template gets them."""
        return self._marked(with_arguments(turns, self._look.joins_arguments, name))

    def _text(self, shown: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        return self._renderer.render(self._template.source, {**variables, "messages": shown})

    def unread_keys(
        self, messages: Turns, name: str, given: Given, rendered: RenderedTurns
    ) -> tuple[str, ...]:
        """Return the keys of messages that changed nothing, apart from KEYS.

        Args:
            messages: Those that were rendered; so are `name` and `given`.
            rendered: What `render` has made of them.
        """
        named = self._read | KEYS
        if has_other_key(self._read):
            named |= {GIVEN}
        keys = dict.fromkeys(key for message in messages for key in message if key not in named)
        if not keys:
            return ()
        # A template may also use a message as a whole, or names that it puts together.
        others = [
            {key: message[key] for key in message if key not in keys} for message in rendered.turns
        ]
        try:
            text = self._text(self._shown(others, name), self._variables(given))
        except ChatError:
            return ()
        return tuple(keys) if text == rendered.text else ()

    def _with_known_roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages, the developer's as the system's if the template has no such role.

        Templates that test for the roles they know leave out a message of any other.
        """
        if DEVELOPER in self._template.source:
            return messages
        system = {"role": SYSTEM}
        return [turn | system if turn["role"] == DEVELOPER else turn for turn in messages]

    @cached_property
    def _read(self) -> frozenset[str]:
        """Attributes and keys that the template may read."""
        return self._look.attributes | self._look.words

    @cached_property
    def _look(self) -> Look:
        return self._renderer.look(self._template.source)

    @cached_property
    def _names(self) -> frozenset[str]:
        """Names of added tokens that are the template's, without those of special tokens."""
        words = list[str]()
        for template in self._beside:
            words += (template.source, *self._renderer.look(template.source).words)
        source = lowered("\0".join(words))
        added = self._tokenizer.added_tokens.keys()
        written = {name for name in added if lowered(name) in source and NO_WORD.search(name)}
        marks = {name for name in added if is_mark_like(name)}  # joined of pieces, perhaps
        return frozenset(written | marks | (self._template.control_tokens & added))

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

    def _marked(self, messages: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the messages with marks in the names of tokens that a client wrote."""
        markers = {OF_THE_MODEL: self._answer_marker}
        return [markers.get(turn["role"], self._marker).marked(turn) for turn in messages]
