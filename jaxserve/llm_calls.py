"""Calls of the Python API: prompts and conversations in, completions or embeddings out."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Unpack

import numpy as np

from jaxserve.call_guard import CallGuard
from jaxserve.chat import Message, Rendered
from jaxserve.completion import Completion, Delta
from jaxserve.delta_streams import DeltaStreams, with_bar
from jaxserve.engine.engine import Engine
from jaxserve.errors import RequestError
from jaxserve.llm_arguments import named_conversations, named_prompts, params_of, params_of_each
from jaxserve.progress import Bar
from jaxserve.prompts import Prepared, Prompt, Prompts, is_conversation
from jaxserve.sampling_params import SamplingFields, SamplingParams


class LLMCalls:
    """The calls of an LLM, which has the constructor that loads what they run on."""

    engine: Engine
    prompts: Prompts
    _guard: CallGuard
    _streams: DeltaStreams
    _bar: Callable[[str], Bar]
    _numbers: Iterator[int]  # of requests, which are their ids

    def generate(
        self,
        prompts: str | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **sampling: Unpack[SamplingFields],
    ) -> list[Completion]:
        """Generate for all prompts together and return when the last one is finished.

        Args:
            prompts: List of texts, lists of token ids, or conversations; or a single text.
            params: Sampling parameters for all prompts, or one per prompt; None is the default.
            **sampling: Single fields of SamplingParams, which override those of params.

        Returns:
            The completions in the order of the prompts, the n choices of a prompt in a row.
            Log-probabilities of the prompt come with choice 0. A choice that failed on the way has
            its `error` set.

        Raises:
            RequestError: A prompt or its parameters can never run. The error names the first such
                prompt as its field, and nothing runs.
            PurposeError: The model makes embeddings and generates no text.
            EngineError: The LLM is closed, or a step has failed.
        """
        named = named_prompts(prompts)
        with self._guard:
            self._check(embed=False)
            return self._complete(self._encode(named), params, sampling)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **sampling: Unpack[SamplingFields],
    ) -> list[Completion]:
        """Answer a conversation, or each of a list of conversations.

        The checkpoint's chat template makes a prompt of each, which is the completion's `prompt`.
        Names of special tokens inside of messages are plain text. To stream an answer, give
        `stream` a conversation.

        Args:
            messages: Conversation, a list of {"role": ..., "content": ...}, or a list of those.
            params: Sampling parameters for all conversations, or one per conversation.
            **sampling: Single fields of SamplingParams, which override those of params.

        Returns:
            The completions, in the order that `generate` returns them in.

        Raises:
            RequestError: A message is malformed, or a prompt can never run. The error's field is
                a path such as messages[2].role.
            ChatError: The chat template is missing, or refuses the messages.
            PurposeError: The model makes embeddings and generates no text.
            EngineError: The LLM is closed, or a step has failed.
        """
        named = named_conversations(messages)
        with self._guard:
            self._check(embed=False)
            rendered = {name: self._render(given, name) for name, given in named.items()}
            return self._complete(rendered, params, sampling)

    def embed(self, prompts: str | Iterable[str | Sequence[int]]) -> list[np.ndarray]:
        """Return the embedding of every prompt, from a model that embeds.

        A text gets the special tokens that the tokenizer's files put around it; token ids are taken
        as they are. Instructions, such as the prompts of config_sentence_transformers.json, are for
        the caller to write before the text.

        Args:
            prompts: List of texts or lists of token ids; or a single text.

        Returns:
            One float32 array of shape [D] and Euclidean length 1 per prompt, in their order.

        Raises:
            RequestError: A prompt is a conversation, has no tokens or is too long.
            PurposeError: The model generates text and makes no embeddings.
            EngineError: The LLM is closed, or a step has failed.
        """
        named = named_prompts(prompts)
        with self._guard:
            self._check(embed=True)
            for name, prompt in named.items():
                if is_conversation(prompt):
                    raise RequestError(name, "is a conversation; give a text or its token ids")
            done = self._complete(self._encode(named), None, {})
        for completion in done:
            if completion.error:
                raise completion.error
        return [np.array(completion.embedding, np.float32) for completion in done]

    def _check(self, embed: bool) -> None:
        """Raise an error when the engine is closed, or the model does not do what is asked."""
        self.engine.check_usable()
        self.prompts.check_purpose(embed)

    def _encode(self, named: Mapping[str, Prompt]) -> dict[str, Rendered]:
        encoded = {}
        for name, prompt in named.items():
            self._guard.pass_on()
            encoded[name] = self.prompts.encode(prompt, name)
        return encoded

    def _render(self, conversation: Sequence[Message], name: str) -> Rendered:
        self._guard.pass_on()
        return self.prompts.chat.render(conversation, name)

    def _complete(
        self,
        prompts: Mapping[str, Rendered],
        params: SamplingParams | Sequence[SamplingParams] | None,
        sampling: SamplingFields,
    ) -> list[Completion]:
        """Check all prompts, run them together and return the completions in their order.

        `prompts` are by their names for errors.
        """
        each = params_of_each(params, sampling, len(prompts))
        prepared = list(map(self._checked, prompts.values(), each, prompts))
        choices = sum(p.request.params.n for p in prepared)
        with self._bar("embedding" if self.prompts.embeds else "generating") as bar:
            deltas = with_bar(self.run(prepared), choices, bar)
            done = {(d.prompt_index, d.index): d.completion for d in deltas if d.completion}
        return [done[key] for key in sorted(done)]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **sampling: Unpack[SamplingFields],
    ) -> Iterator[Delta]:
        """Generate for one prompt and yield the text as it grows.

        Leaving the iterator early aborts the request.

        Args:
            prompt: Text, token ids or conversation.
            params: Sampling parameters; None is the default.
            **sampling: Single fields of SamplingParams, which override those of params.

        Returns:
            Iterator of deltas. The last delta of each of the n choices carries its completion.

        Raises:
            RequestError: The prompt or its parameters can never run.
            PurposeError: The model makes embeddings and generates no text.
            EngineError: The LLM is closed, or a step has failed.
        """
        return self.run([self.prepare(prompt, params_of(params, sampling))])

    def prepare(
        self, prompt: Prompt, params: SamplingParams | None = None, name: str = ""
    ) -> Prepared:
        """Tokenize and check one prompt for `run`.

        Args:
            prompt: Text, token ids or conversation.
            params: Sampling parameters; None is the default.
            name: Field that errors about the prompt name; by default "prompt", or "messages" for a
                conversation.

        Returns:
            The prompt, ready to run.

        Raises:
            RequestError: The prompt or its parameters can never run.
            PurposeError: The model makes embeddings and generates no text.
            EngineError: The LLM is closed.
        """
        with self._guard:
            self._check(embed=False)
            name = name or ("messages" if is_conversation(prompt) else "prompt")
            return self._checked(self.prompts.encode(prompt, name), params_of(params, {}), name)

    def _checked(self, prompt: Rendered, params: SamplingParams, name: str) -> Prepared:
        """Compile the grammar, if any, and check the request under an id of its own."""
        self._guard.pass_on()
        id = str(next(self._numbers))
        params = self.prompts.constrain(prompt, params)
        grammar = self.prompts.grammars.compile(params.structure) if params.structure else None
        return self.prompts.check(prompt, params, name, id=id, grammar=grammar)

    def run(self, prompts: Sequence[Prepared]) -> Iterator[Delta]:
        """Run prepared prompts together and yield their text as it grows.

        Several iterators may be open at once: asking any of them for its next delta steps the one
        engine, and so advances them all. An abandoned iterator aborts what is left of its prompts.

        Args:
            prompts: Prompts from `prepare`; each may run once.

        Yields:
            Deltas of all choices of all prompts, in the order in which the engine makes them.

        Raises:
            EngineError: The LLM is closed, or a step has failed.
        """
        if prompts:
            yield from self._streams.run(prompts)
