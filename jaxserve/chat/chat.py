"""From a conversation to a prompt: its text, and ids in which nobody but the template begins or
ends a turn.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jaxserve.chat.answers import Forms, Reading, choose_forms
from jaxserve.chat.answers.call_grammar import Calling, calls_alone, text_and_calls
from jaxserve.chat.answers.thinking import CLOSE, MARKS, opened_by
from jaxserve.chat.marking import Marker
from jaxserve.chat.messages import plain_messages
from jaxserve.chat.renderer import SECONDS, Look, TemplateRenderer
from jaxserve.chat.source import ChatTemplate, read_template
from jaxserve.chat.tools import Tools, with_arguments
from jaxserve.errors import ChatError, RequestError
from jaxserve.structure import Structure
from jaxserve.tokenizer import MARK, Tokenizer, TokenizerError

NO_WORD = re.compile(
    r"[^\w\s]"
)  # runs of spaces are added tokens, too (GPT-NeoX), and any template has some
NOTHING_BUT_CONTENT = Reading()
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(frozen=True)
class Rendered:
    """A conversation as the model reads it, up to where its answer begins. reading: how that is to
    be read.

    structure: what it has to follow, where functions have to be called.
    """

    text: str
    token_ids: tuple[int, ...]
    reading: Reading = NOTHING_BUT_CONTENT
    structure: Structure | None = None


class Chat:
    """The chat template and the tokenizer of one checkpoint folder; for use from several threads.

    Names of special tokens become their ids where the template writes them, and stay text where a
    client does. The same holds for added tokens that are not marked special, if the template's
    source has them (DeepSeek writes its turns so), unless the template looks for them in what it is
    given, as for </think>.
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
        """template_file: instead of the folder's; either is read with the first use. seconds: for
        one rendering.

        tool_parser, reasoning_parser: of TOOL_PARSERS and REASONING_PARSERS; see choose_forms.
        """
        self._parsers = tool_parser, reasoning_parser
        self.folder, self._tokenizer, self._file = folder, tokenizer, template_file
        self._renderer = TemplateRenderer(seconds)

    @cached_property
    def template(self) -> ChatTemplate:
        """ChatError when there is none, or it cannot be read."""
        return read_template(self.folder, self._tokenizer, self._file)

    @cached_property
    def forms(self) -> Forms:
        """Those of the answers; ChatError as for the template."""
        return choose_forms(self.template.source, *self._parsers)

    @cached_property
    def _look(self) -> Look:
        return self._renderer.look(self.template.source)

    @cached_property
    def _marker(self) -> Marker:
        source, look = self.template.source, self._look
        written = {
            name for name in self._tokenizer.added_tokens if name in source and NO_WORD.search(name)
        }
        return Marker(
            self._tokenizer.special_tokens.keys() | (written - look.sought), look.words | ROLES
        )

    def render(
        self, messages: object, name: str = "messages", tools: Tools | None = None
    ) -> Rendered:
        """The prompt for the assistant's next message.

        messages: a list of {"role": ..., "content": ...}; `name` is their path in the request.
        tools: that it may call. RequestError says what is wrong with them, ChatError what the
        template makes of them, or that it has no use for tools.
        """
        if tools:
            self._check_tools()
        plain = with_arguments(plain_messages(messages, name), self._look.joins_arguments, name)
        variables = {
            "messages": self._marker.marked(plain),
            "tools": self._marker.marked(list(tools.offered))
            if tools
            else None,  # templates ask whether they are none
            "documents": None,
            "add_generation_prompt": True,
        }
        text = self._renderer.render(self.template.source, self.template.tokens | variables)
        try:
            ids = self._tokenizer.encode_special(text)
        except TokenizerError as error:
            raise RequestError(name, str(error)) from None
        text = text.replace(MARK, "")
        reading = self._reading(text, tools)
        return Rendered(text, tuple(ids), reading, self._structure(tools, reading))

    def _check_tools(self) -> None:
        if not self._look.takes_tools:
            where = self._file or self.folder
            raise ChatError(
                f"the chat template of {where.name} takes none; --chat-template names another",
                "tools",
            )
        if self.forms.tools is None:
            problem = (
                "how this model writes calls is not known, or turned off; --tool-parser "
                "says it to the server"
            )
            raise ChatError(problem, "tools")

    def _reading(self, prompt: str, tools: Tools | None) -> Reading:
        forms = self.forms
        marks = (forms.tools.marks if tools and forms.tools else ()) + (
            MARKS if forms.thinks else ()
        )
        special = self._tokenizer.special_tokens
        return Reading(
            tools=forms.tools if tools else None,
            names=tools.names if tools else frozenset(),
            parallel=tools is None or tools.parallel,
            thinks=forms.thinks,
            opened=forms.thinks and opened_by(prompt),
            spelled={special[mark]: mark for mark in marks if mark in special},
        )

    def _structure(self, tools: Tools | None, reading: Reading) -> Structure | None:
        """The grammar of an answer whose calls have to be made, or to follow their schemas."""
        if tools is None or reading.tools is None or not (tools.required or tools.strict):
            return None
        functions = [tool["function"] for tool in tools.offered]
        if tools.required:
            functions = [function for function in functions if function["name"] in tools.required]
        calling = Calling(
            [f["name"] for f in functions], tools.parallel, self._tokenizer.special_tokens
        )
        writing = reading.tools.writing
        if tools.required:
            schemas = [function["parameters"] for function in functions]
            return Structure(
                "lark",
                calls_alone(writing, calling, schemas, CLOSE if reading.opened else None),
                "tools",
            )
        schemas = [f["parameters"] if f["name"] in tools.strict else {} for f in functions]
        try:
            return Structure(
                "lark",
                text_and_calls(writing, calling, schemas, MARKS if reading.thinks else ()),
                "tools",
            )
        except ValueError as error:
            problem = (
                f"ask for strict calls, which this model's form leaves to tool_choice "
                f"alone: {error}"
            )
            raise ChatError(f'{problem} (choose "required" or one function)', "tools") from None

    def close(self) -> None:
        """End the rendering process; a later use starts another."""
        self._renderer.close()
