"""Prompts as clients give them, turned into requests that can run."""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace

from jaxserve.chat import Chat, Message, Rendered, TemplateOptions, Tools
from jaxserve.chat.answers import Reading
from jaxserve.chat.chat import NO_OPTIONS
from jaxserve.errors import ContextLengthError, PurposeError, RequestError
from jaxserve.request import Request
from jaxserve.request_values import check_token_ids, integers
from jaxserve.sampling_params import SamplingParams
from jaxserve.structure import Grammar
from jaxserve.structure.grammars import Grammars
from jaxserve.tokenizer import Tokenizer, TokenizerError

# Text, token ids, or a conversation whose answer is to be generated.
Prompt = str | Sequence[int] | Sequence[Message]
# max_tokens of a request, or what context and capacity leave; RequestError names the given field.
MaxTokens = Callable[[Request, str], int]


@dataclass(frozen=True)
class Prepared:
    """Checked prompt, which can run.

    `text` is the prompt as text. `reading` says how the answer to a conversation is parsed; with
    `echo` all of the answer is content, as it begins with the prompt. `unread` is as in Rendered.
    """

    request: Request
    text: str
    reading: Reading
    unread: tuple[str, ...] = ()


def is_conversation(prompt: object) -> bool:
    """Return whether a prompt is a list of messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


@dataclass(frozen=True)
class Prompts:
    """Tokenizer, chat template and limits of a model, which make requests of its prompts.

    `max_context` and `capacity`, what the page pool holds of one sequence, are in tokens.
    `max_tokens` is the scheduler's function, which knows both. `embeds` says that the model makes
    embeddings and no text.
    """

    tokenizer: Tokenizer
    chat: Chat
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_context: int
    capacity: int
    max_tokens: MaxTokens
    grammars: Grammars
    embeds: bool = False

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return min(self.max_context, self.capacity)

    def check_purpose(self, embed: bool) -> None:
        """Raise PurposeError unless the model embeds, or generates, as `embed` asks."""
        if embed and not self.embeds:
            raise PurposeError(
                "this model generates text and makes no embeddings (serve one that embeds)"
            )
        if self.embeds and not embed:
            raise PurposeError(
                "this model makes embeddings and generates no text (ask for embeddings)"
            )

    def encode(
        self,
        prompt: Prompt,
        name: str,
        tools: Tools | None = None,
        *,
        options: TemplateOptions = NO_OPTIONS,
        add_special_tokens: bool = True,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        """Return a prompt's text and token ids; any thread may call this.

        `name` is the prompt's field for RequestError; `tools` and `options` are those of a
        conversation, whose assistant's turn `add_generation_prompt` opens. `add_special_tokens` is
        for texts.
        """
        if is_conversation(prompt):
            return self.chat.render(prompt, name, tools, add_generation_prompt, options)
        if not isinstance(prompt, str):
            # The number is checked before the ids: one message of a client can hold millions.
            if isinstance(prompt, Sized) and len(prompt) > self.max_context:
                raise ContextLengthError(
                    name,
                    f"{len(prompt)} tokens exceed the context of {self.max_context} (shorten it)",
                )
            ids = integers(name, prompt)
            return Rendered(self.decode(ids, name), ids)
        try:
            return Rendered(prompt, tuple(self.tokenizer.encode(prompt, add_special_tokens)))
        except TokenizerError as error:
            raise RequestError(name, f"cannot be tokenized: {error}") from None

    def decode(self, ids: Sequence[int], name: str) -> str:
        """Return the text of token ids without special tokens; refuse unknown ids."""
        check_token_ids(name, ids, self.vocab_size)
        return self.tokenizer.decode(ids)

    def constrain(self, prompt: Rendered, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the grammar of the calls that the prompt's tools ask for.

        A structure of the parameters may begin behind a thought, and calls may stand in its place.

        RequestError is raised for a structure where a call has to be made.
        """
        if params.structure is None:
            return replace(params, structure=prompt.structure) if prompt.structure else params
        if prompt.frame is None:
            problem = (
                "is given together with calls that have to be made, or that have no mark before "
                "them in this model's format; leave out one of them"
            )
            raise RequestError(params.structure.field, problem)
        return replace(params, structure=replace(params.structure, frame=prompt.frame))

    def check(
        self,
        prompt: Rendered,
        params: SamplingParams,
        name: str,
        *,
        id: str,
        grammar: Grammar | None = None,
        priority: int = 0,
        client: str = "",
        salt: str = "",
        deadline: float | None = None,
        since: float | None = None,
    ) -> Prepared:
        """Return a request that can run; RequestError has `name` as the prompt's field.

        The other arguments are Request's.
        """
        if not prompt.token_ids:
            raise RequestError(name, "has no tokens, and this tokenizer adds none (give some text)")
        request = Request(
            id=id,
            prompt=prompt.token_ids,
            params=params,
            eos_ids=self.eos_ids,
            priority=priority,
            client=client,
            salt=salt,
            deadline=deadline,
            since=since,
            grammar=grammar,
            thought_budget=prompt.thought_budget,
        )
        request.check(self.vocab_size, name)
        self.max_tokens(request, name)
        reading = Reading() if params.echo else prompt.reading
        return Prepared(request, prompt.text, reading, prompt.unread)
