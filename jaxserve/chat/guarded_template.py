"""A chat template whose marks of turns no client can write."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jaxserve.chat.answers import AnswerFormats, choose_formats
from jaxserve.chat.errors import LeftOutError, RefusedByTemplateError
from jaxserve.chat.marking import Marker, lowered
from jaxserve.chat.marks import is_mark_like
from jaxserve.chat.renderer import Look, TemplateRenderer
from jaxserve.chat.source import ChatTemplate
from jaxserve.chat.tools import Tools, with_arguments
from jaxserve.chat.traces import left_out
from jaxserve.chat.turns import SYSTEM, Turns, forms
from jaxserve.errors import ChatError
from jaxserve.tokenizer import Tokenizer
from jaxserve.tokenizer.special import NO_WORD

DEVELOPER = "developer"  # OpenAI's newer name of the system's role
# Keys of OpenAI's messages that nobody misses in a prompt. Those of its answers that say something
# (refusal, audio, function_call) are missed.
KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "annotations"})
ROLES = frozenset({SYSTEM, DEVELOPER, "user", "assistant", "tool"})


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
        messages: list[dict[str, Any]],
        name: str,
        tools: Tools | None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of a conversation, with marks in what clients wrote.

        `messages` are plain messages, `name` their path in the request. With
        `add_generation_prompt` the assistant's turn is opened. Where the template refuses them or
        leaves one out, it gets them in other forms (see turns.forms). RequestError is raised for
        arguments of calls that the template cannot use, ChatError where it fails, or takes them in
        no form.
        """
        variables = {
            # None and not an empty list: templates ask whether tools are none.
            "tools": self._marker.marked(list(tools.offered)) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        problem: ChatError | None = None
        for form in forms(self._with_known_roles(messages)):
            try:
                return self._render(form, name, variables)
            except (LeftOutError, RefusedByTemplateError) as error:
                problem = problem or error  # of the messages as they were sent
        assert problem
        raise problem

    def _render(self, messages: Turns, name: str, variables: Mapping[str, Any]) -> str:
        """Return the text of a conversation; LeftOutError if a message is not in it."""
        marked = self._marked(with_arguments(messages, self._look.joins_arguments, name))

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            known = self._template.tokens | {**variables, "messages": messages}
            return self._renderer.render(self._template.source, known)

        text = render(marked)
        missed = left_out(marked, text, render)
        if missed is not None:
            role = messages[missed]["role"]
            raise LeftOutError(
                f"the chat template leaves this message of role {role!r:.80} out of the prompt",
                f"{name}[{missed}].content",
            )
        return text

    def unread_keys(
        self, messages: list[dict[str, Any]], name: str, tools: Tools | None, text: str
    ) -> tuple[str, ...]:
        """Return the keys of messages that changed nothing, apart from KEYS.

        Args:
            messages: Those that were rendered; so are `name` and `tools`.
            text: What `render` has made of them.
        """
        named = self._look.attributes | self._look.words | KEYS
        keys = dict.fromkeys(key for message in messages for key in message if key not in named)
        if not keys:
            return ()
        # A template may also use a message as a whole, or names that it puts together.
        others = [{key: message[key] for key in message if key not in keys} for message in messages]
        try:
            is_same = self.render(others, name, tools) == text
        except ChatError:
            return ()
        return tuple(keys) if is_same else ()

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
        markers = {"assistant": self._answer_marker}
        return [markers.get(turn["role"], self._marker).marked(turn) for turn in messages]
