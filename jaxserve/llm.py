"""LLM, the Python API: prompts and conversations in, completions or embeddings out."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Unpack

import numpy as np

from jaxserve.chat import Message
from jaxserve.completion import Completion, Delta
from jaxserve.delta_streams import DeltaStreams, with_bar
from jaxserve.engine.trace import written_trace
from jaxserve.llm_arguments import OTHER_KEYWORDS, ChatFields, named_conversations, named_prompts
from jaxserve.loaded_llm import LoadedLLM, embeddings_of
from jaxserve.names_elsewhere import LLM_ATTRIBUTES, explains_names
from jaxserve.prompts import Prepared, Prompt, is_conversation
from jaxserve.sampling_params import SamplingFields, SamplingParams


@explains_names(OTHER_KEYWORDS, LLM_ATTRIBUTES)
class LLM(LoadedLLM):
    """A checkpoint on this machine's devices, ready to generate text or to embed.

    Close it, or use it as a context manager, to free its device memory. A call waits until the
    fewest steps are compiled that its prompts can run with; smaller steps, which waste less, are
    compiled while it runs. Which step computes a token changes its logits within 1e-4 in float32:
    for the same values each time use `warm_up` first, or a deterministic engine. On a GPU that has
    not compiled every step of the model, and on several hosts, a call waits for all steps that it
    can reach.

    Threads may share an LLM: their calls run together. The threads take turns, first come first
    served, and one for which no token has come computes a step for all of them. Forks may not.
    A Ctrl-C takes effect between two steps: the call raises KeyboardInterrupt, its requests are
    aborted, and the next call is answered as if nothing had happened. For this a call on the main
    thread replaces the handler of SIGINT until it ends. A second Ctrl-C, five seconds after one
    that had no effect, ends a step that hangs, and the engine with it.

    No environment variable is set. While it loads and compiles, jax.config names the folder of its
    compiled steps, unless the program, or JAX_COMPILATION_CACHE_DIR, names one already; afterwards
    jax.config is as it was before. A compile that runs when a call ends goes on to its end.

    Its arguments and attributes are those of LoadedLLM.
    """

    def _start_calls(self) -> Callable[[], None]:
        self._streams = DeltaStreams(self.engine, self.model.tokenizer, self._guard, self.steps)
        return self.engine.check_usable

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
        with self._guard.holding_interrupts():
            with self._guard:
                prepared = self._requests.of_prompts(named, params, sampling)
            return self._complete(prepared)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Unpack[ChatFields],
    ) -> list[Completion]:
        """Answer a conversation, or each of a list of conversations.

        The checkpoint's chat template makes a prompt of each, which is the completion's `prompt`.
        Names of special tokens inside of messages are plain text. To stream an answer, give
        `stream` a conversation.

        Args:
            messages: Conversation, a list of {"role": ..., "content": ...}, or a list of those.
            params: Sampling parameters for all conversations, or one per conversation.
            **fields: Single fields of SamplingParams, which override those of params; and of a
                conversation those of TemplateOptions, such as reasoning_effort.

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
        with self._guard.holding_interrupts():
            with self._guard:
                prepared = self._requests.of_conversations(named, params, fields)
            return self._complete(prepared)

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
        with self._guard.holding_interrupts():
            with self._guard:
                prepared = self._requests.to_embed(named)
            return embeddings_of(self._complete(prepared))

    def _complete(self, prepared: Sequence[Prepared]) -> list[Completion]:
        """Run prompts together and return the completions in their order."""
        choices = sum(p.request.params.n for p in prepared)
        what = "embedding" if self.prompts.embeds else "generating"
        with self._bar(what) as bar, closing(self.run(prepared)) as running:
            deltas = with_bar(running, choices, bar)
            done = {(d.prompt_index, d.index): d.completion for d in deltas if d.completion}
        return [done[key] for key in sorted(done)]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **fields: Unpack[ChatFields],
    ) -> Iterator[Delta]:
        """Generate for one prompt and yield the text as it grows.

        Leaving the iterator early aborts the request.

        Args:
            prompt: Text, token ids or conversation.
            params: Sampling parameters; None is the default.
            **fields: Single fields of SamplingParams, which override those of params; and of a
                conversation those of TemplateOptions, such as reasoning_effort.

        Returns:
            Iterator of deltas. The last delta of each of the n choices carries its completion.

        Raises:
            RequestError: The prompt or its parameters can never run.
            PurposeError: The model makes embeddings and generates no text.
            EngineError: The LLM is closed, or a step has failed.
        """
        return self.run([self.prepare(prompt, params, **fields)])

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        name: str = "",
        **fields: Unpack[ChatFields],
    ) -> Prepared:
        """Tokenize and check one prompt for `run`.

        Args:
            prompt: Text, token ids or conversation.
            params: Sampling parameters; None is the default.
            name: Field that errors about the prompt name; by default "prompt", or "messages" for a
                conversation.
            **fields: Single fields of SamplingParams and TemplateOptions, as for `stream`.

        Returns:
            The prompt, ready to run.

        Raises:
            RequestError: The prompt or its parameters can never run.
            PurposeError: The model makes embeddings and generates no text.
            EngineError: The LLM is closed.
        """
        with self._guard:
            name = name or ("messages" if is_conversation(prompt) else "prompt")
            return self._requests.of_prompt(name, prompt, params, fields)

    def run(self, prompts: Sequence[Prepared]) -> Generator[Delta]:
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

    def warm_up(self, prompts: Sequence[Prepared] | None = None) -> None:
        """Compile the steps that prompts need, as far as that has not happened yet.

        Args:
            prompts: Prompts whose steps are compiled; None is every step there is.

        Raises:
            EngineError: The LLM is closed, or a step has failed.
            MemoryLimitError: A step needs more memory than the devices have.
        """
        self.steps.compile_for(prompts)

    @contextmanager
    def trace(self, path: str | Path) -> Iterator[None]:
        """Write a timeline of what runs in a block to a file, for ui.perfetto.dev.

        Steps with their times, the chunks of every row, prefix hits, preemptions, and curves of
        rows, waiting sequences and pages. A step adds a few hundred bytes for each of its rows.
        Blocks may lie inside of each other, but not overlap in other ways.

        Args:
            path: File to write when the block ends, as it should or by an exception.

        Raises:
            ConfigError: The file cannot be written.
        """
        with written_trace(self.engine, Path(path).absolute(), self._guard):
            yield

    def close(self) -> None:
        """Free parameters, pages and rows.

        Open iterators, and calls of other threads, end with EngineError. Nothing happens if the
        LLM is closed already, or in a fork of the process that made it.
        """
        if self._guard.in_fork:
            return
        with self._guard:
            self._free()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
