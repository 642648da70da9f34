"""From a conversation to a prompt: its text, and ids in which nobody but the template begins or ends a turn."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jaxserve.chat.marking import Marker
from jaxserve.chat.messages import plain_messages
from jaxserve.chat.renderer import SECONDS, TemplateRenderer
from jaxserve.chat.source import ChatTemplate, read_template
from jaxserve.errors import RequestError
from jaxserve.tokenizer import MARK, Tokenizer, TokenizerError

NO_WORD = re.compile(r"[^\w\s]")  # runs of spaces are added tokens, too (GPT-NeoX), and any template has some
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(frozen=True)
class Rendered:
    """A conversation as the model reads it, up to where its answer begins."""

    text: str
    token_ids: tuple[int, ...]


class Chat:
    """The chat template and the tokenizer of one checkpoint folder; for use from several threads.

    Names of special tokens become their ids where the template writes them, and stay text where a client does. The
    same holds for added tokens that are not marked special, if the template's source has them (DeepSeek writes its
    turns so), unless the template looks for them in what it is given, as for </think>.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, template_file: Path | None = None, seconds: float = SECONDS
    ) -> None:
        """template_file: instead of the folder's; either is read with the first use. seconds: for one rendering."""
        self.folder, self._tokenizer, self._file = folder, tokenizer, template_file
        self._renderer = TemplateRenderer(seconds)

    @cached_property
    def template(self) -> ChatTemplate:
        """ChatError when there is none, or it cannot be read."""
        return read_template(self.folder, self._tokenizer, self._file)

    @cached_property
    def _marker(self) -> Marker:
        words, sought = self._renderer.strings(self.template.source)
        source = self.template.source
        written = {name for name in self._tokenizer.added_tokens if name in source and NO_WORD.search(name)}
        return Marker(self._tokenizer.special_tokens.keys() | (written - sought), words | ROLES)

    def render(self, messages: object, name: str = "messages") -> Rendered:
        """The prompt for the assistant's next message.

        messages: a list of {"role": ..., "content": ...}; `name` is their path in the request. RequestError says what
        is wrong with them, ChatError what the template makes of them.
        """
        plain = plain_messages(messages, name)
        conversation = {"messages": self._marker.marked(plain), "add_generation_prompt": True}
        nothing = {"tools": None, "documents": None}  # templates ask whether they are none
        text = self._renderer.render(self.template.source, self.template.tokens | nothing | conversation)
        try:
            ids = self._tokenizer.encode_special(text)
        except TokenizerError as error:
            raise RequestError(name, str(error)) from None
        return Rendered(text.replace(MARK, ""), tuple(ids))

    def close(self) -> None:
        """End the rendering process; a later use starts another."""
        self._renderer.close()
