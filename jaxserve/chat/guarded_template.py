"""A chat template whose marks of turns no client can write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxserve.chat.answers import AnswerFormats, choose_formats
from jaxserve.chat.errors import LeftOutError, RefusedByTemplateError
from jaxserve.chat.marking import Marker, lowered
from jaxserve.chat.marks import is_mark_like
from jaxserve.chat.messages import OF_THE_MODEL
from jaxserve.chat.renderer import Look, TemplateRenderer
from jaxserve.chat.source import ChatTemplate
from jaxserve.chat.tools import Tools, with_arguments
from jaxserve.chat.traces import left_out
from jaxserve.chat.turns import DEVELOPER, SYSTEM, TOOL, USER, Turns, forms
from jaxserve.errors import ChatError
from jaxserve.tokenizer import Tokenizer
from jaxserve.tokenizer.special import NO_WORD

# Keys of OpenAI's messages that nobody misses in a prompt. Those of its answers that say something
# (refusal, audio, function_call) are missed.
KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "annotations"})
ROLES = frozenset({SYSTEM, DEVELOPER, USER, OF_THE_MODEL, TOOL})


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

    @property
    def takes_tools(self) -> bool:
        """Return whether the template uses the tools of a request."""
        return self._look.takes_tools

    def render(
        self,
        messages: Turns,
        name: str,
        tools: Tools | None,
        add_generation_prompt: bool = True,
    ) -> RenderedTurns:
        """Return the text of a conversation, with marks in what clients wrote.

        `messages` are plain messages, `name` their path in the request. With
        `add_generation_prompt` the assistant's turn is opened. Where the template refuses them or
        leaves one out, it gets them in other forms (see turns.forms). RequestError is raised for
        arguments of calls that the template cannot use, ChatError where it fails, or takes them in
        no form.
        """
        variables = self._variables(tools, add_generation_prompt)
        read = self._look.attributes | self._look.words
        tries = forms(self._with_known_roles(messages), read)
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

    def _variables(self, tools: Tools | None, add_generation_prompt: bool) -> dict[str, Any]:
        """Return the variables of the template beside the messages."""
        return {
            **self._template.tokens,
            # None and not an empty list: templates ask whether tools are none.
            "tools": self._marker.marked(list(tools.offered)) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
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
        self, messages: Turns, name: str, tools: Tools | None, rendered: RenderedTurns
    ) -> tuple[str, ...]:
        """Return the keys of messages that changed nothing, apart from KEYS.

        Args:
            messages: Those that were rendered; so are `name` and `tools`.
            rendered: What `render` has made of them.
        """
        named = self._look.attributes | self._look.words | KEYS
        keys = dict.fromkeys(key for message in messages for key in message if key not in named)
        if not keys:
            return ()
        # A template may also use a message as a whole, or names that it puts together.
        others = [
            {key: message[key] for key in message if key not in keys} for message in rendered.turns
        ]
        try:
            text = self._text(self._shown(others, name), self._variables(tools, True))
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
