"""From a prompt as a client gives it to a request that can run: the same checks at every door."""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace

from jaxserve.chat import Chat, Message, Rendered, Tools
from jaxserve.chat.answers import Reading
from jaxserve.errors import ContextLengthError, NotBuiltInError, RequestError
from jaxserve.request import Request, SamplingParams, check_token_ids, integers
from jaxserve.structure import Grammar
from jaxserve.structure.grammars import Grammars
from jaxserve.tokenizer import Tokenizer, TokenizerError

Prompt = (
    str | Sequence[int] | Sequence[Message]
)  # text, its token ids, or a conversation that awaits its answer
MaxTokens = Callable[[Request, str], int]


@dataclass(frozen=True)
class Prepared:
    """A prompt that was checked: it can run. reading: how its answer is to be read, where it is a
    conversation's; with echo it is whole.
    """

    request: Request
    text: str
    reading: Reading


def is_conversation(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


@dataclass(frozen=True)
class Prompts:
    """What a model's prompts become. max_tokens: the scheduler's, which knows context and capacity.

    grammars: of the model's vocabulary. embeds: the model makes embeddings of them, and no text.
    """

    tokenizer: Tokenizer
    chat: Chat
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_context: int
    max_tokens: MaxTokens
    grammars: Grammars
    embeds: bool = False

    def check_purpose(self, embed: bool) -> None:
        """NotBuiltInError when the model does not do what is asked for: to embed, or else to
        generate.
        """
        if embed and not self.embeds:
            raise NotBuiltInError(
                "this model generates text and makes no embeddings (serve one that embeds)"
            )
        if self.embeds and not embed:
            raise NotBuiltInError(
                "this model makes embeddings and generates no text (ask for embeddings)"
            )

    def encode(self, prompt: Prompt, name: str, tools: Tools | None = None) -> Rendered:
        """Text and token ids; RequestError with `name` as the field. From any thread. tools: of a
        conversation.
        """
        if is_conversation(prompt):
            return self.chat.render(prompt, name, tools)
        if not isinstance(prompt, str):
            # Before anything is done with each of them: a message holds millions.
            if isinstance(prompt, Sized) and len(prompt) > self.max_context:
                raise ContextLengthError(
                    name,
                    f"has {len(prompt)} tokens; the context is {self.max_context} (shorten it)",
                )
            ids = integers(name, prompt)
            return Rendered(self.decode(ids, name), ids)
        try:
            return Rendered(prompt, tuple(self.tokenizer.encode(prompt)))
        except TokenizerError as error:
            raise RequestError(name, str(error)) from None

    def decode(self, ids: Sequence[int], name: str) -> str:
        """The text of token ids, without special tokens; RequestError, with `name` as the field,
        for unknown ones.
        """
        check_token_ids(name, ids, self.vocab_size)
        return self.tokenizer.decode(ids)

    def constrain(self, prompt: Rendered, params: SamplingParams) -> SamplingParams:
        """With the grammar of the calls that are to be made, if any; RequestError for what does not
        go together.
        """
        if prompt.structure:
            if params.structure:
                problem = (
                    "is given together with calls that follow a grammar of their own; "
                    "leave out one of them"
                )
                raise RequestError(params.structure.field, problem)
            params = replace(params, structure=prompt.structure)
        elif params.structure and prompt.reading.names:
            problem = (
                "is given together with tools, whose calls it would forbid; leave out one of them"
            )
            raise RequestError(params.structure.field, problem)
        elif params.structure and prompt.reading.opened:
            problem = (
                "is given, but the chat template has the answer begin inside of a thought "
                "(leave it out)"
            )
            raise RequestError(params.structure.field, problem)
        return params

    def check(
        self,
        prompt: Rendered,
        params: SamplingParams,
        name: str,
        *,
        id: str,
        grammar: Grammar | None = None,
        priority: int = 0,
        salt: str = "",
        deadline: float | None = None,
        since: float | None = None,
    ) -> Prepared:
        """RequestError, with `name` as the prompt's field, when it could never run."""
        if not prompt.token_ids:
            raise RequestError(name, "has no tokens, and this tokenizer adds none (give some text)")
        request = Request(
            id=id,
            prompt=prompt.token_ids,
            params=params,
            eos_ids=self.eos_ids,
            priority=priority,
            salt=salt,
            deadline=deadline,
            since=since,
            grammar=grammar,
        )
        request.check(self.vocab_size, name)
        self.max_tokens(request, name)
        return Prepared(request, prompt.text, Reading() if params.echo else prompt.reading)
