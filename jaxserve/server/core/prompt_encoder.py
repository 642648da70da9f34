"""Tokenizing of prompts and compilation of grammars, beside the event loop where they take long."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from jaxserve.chat import Rendered
from jaxserve.errors import CapacityError, ContextLengthError, DeadlineError, RequestError
from jaxserve.prompts import Prepared, Prompt, Prompts, is_conversation
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.core.client_rules import ANY_CLIENT, ClientRules
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.workers import Workers
from jaxserve.structure import Grammar, Structure

LEAST_SHARE = 4  # of the context: the part that is enough for an answer
SHORT_PROMPT = 2048  # characters or token ids that are encoded on the event loop itself


class PromptEncoder:
    """Makes the engine's requests of those that come in. Lives on the event loop.

    Args:
        rules: What clients may ask for: with `strict_max_tokens` a max_tokens beyond what context
            and page pool leave is refused; otherwise the answer may be as long as they leave.
    """

    def __init__(
        self,
        prompts: Prompts,
        workers: Workers,
        max_prompt_bytes: int,
        rules: ClientRules = ANY_CLIENT,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._rules = rules
        self._clock = clock
        self._prompts = prompts
        self._workers = workers
        self._max_prompt_bytes = max_prompt_bytes

    async def prepare(self, incoming: IncomingRequest, engine_id: str) -> Prepared:
        """Make the engine's request, under an id of its own.

        The sampling parameters are the request's, with the structure that its tools ask for.

        Raises:
            RequestError: The request could never run.
            DeadlineError: The deadline has passed before the prompt was tokenized, or the grammar
                compiled.
        """
        rendered, params, grammar = await self._encode_in_time(incoming)
        check = partial(
            self._prompts.check,
            rendered,
            name=incoming.prompt_field,
            id=engine_id,
            priority=incoming.priority,
            client=incoming.client,
            salt=incoming.cache_salt,
            deadline=incoming.deadline,
            since=self._clock(),
            grammar=grammar,
        )
        if incoming.clamps_max_tokens:
            return self._fitting(check, params, len(rendered.token_ids), incoming.prompt_field)
        try:
            return check(params)
        except (ContextLengthError, CapacityError):
            if self._rules.strict_max_tokens or params.max_tokens is None:
                raise
            # Clients ask for 32,000 tokens whatever the prompt is; without a number an answer may
            # be as long as there is room.
            return check(replace(params, max_tokens=None))

    def _fitting(
        self,
        check: Callable[[SamplingParams], Prepared],
        params: SamplingParams,
        tokens: int,
        name: str,
    ) -> Prepared:
        """Return a request whose answer is as long as asked, or as context and page pool leave.

        Raises ContextLengthError where they leave too few tokens. An answer that may have fewer
        needs no more, and of a small context a quarter is enough.
        """
        longest = self._prompts.longest
        needed = min(self._rules.least_answer_tokens, longest // LEAST_SHARE or 1)
        if params.max_tokens is not None:
            needed = min(needed, params.max_tokens)
        room = longest - tokens
        if room < needed:
            problem = (
                f"{tokens} tokens leave {max(0, room)} of the {longest} of context and page pool; "
                f"the answer needs {needed} (shorten the prompt, or lower --least-answer-tokens)"
            )
            raise ContextLengthError(name, problem, tokens, longest - needed)
        if params.max_tokens is not None and params.max_tokens > room:
            params = replace(params, max_tokens=None)
        return check(params)

    async def _encode_in_time(
        self, incoming: IncomingRequest
    ) -> tuple[Rendered, SamplingParams, Grammar | None]:
        deadline = incoming.deadline
        try:
            async with asyncio.timeout(None if deadline is None else deadline - self._clock()):
                rendered = await self._encode(incoming)
                params = self._prompts.constrain(rendered, incoming.params)
                grammar = await self._compile(params.structure) if params.structure else None
                return rendered, params, grammar
        except TimeoutError:
            raise DeadlineError(
                "the deadline passed while the prompt was tokenized or the grammar compiled"
            ) from None

    async def tokenize(self, prompt: Prompt, name: str, **options: Any) -> Rendered:
        """Return text and token ids for a call of Tokenize; arguments as in `Prompts.encode`."""
        self._check_size(prompt, name)
        work = partial(self._prompts.encode, prompt, name, **options)
        return await self._workers.serve_tokenize_call(work)

    async def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text that ends an answer, for which its client waits."""
        work = partial(self._prompts.tokenizer.encode, text, add_special_tokens=False)
        return len(work() if len(text) <= SHORT_PROMPT else await self._workers.tokenize(work))

    async def detokenize(self, ids: list[int], name: str) -> str:
        """Return the text of token ids for a call of Detokenize; `name` is their field."""
        return await self._workers.serve_tokenize_call(partial(self._prompts.decode, ids, name))

    async def _encode(self, incoming: IncomingRequest) -> Rendered:
        prompt = incoming.prompt
        self._check_size(prompt, incoming.prompt_field)
        work = partial(
            self._prompts.encode,
            prompt,
            incoming.prompt_field,
            incoming.tools,
            options=incoming.options,
        )
        # Chat templates are programs of the checkpoint, which may take any time.
        if is_conversation(prompt) or len(prompt) > SHORT_PROMPT:
            return await self._workers.tokenize(work)
        return work()

    async def _compile(self, structure: Structure) -> Grammar:
        grammars = self._prompts.grammars
        work = partial(grammars.compile, structure)
        # A grammar in the cache must not wait behind others that are being compiled.
        if grammars.knows(structure):
            return await self._workers.tokenize(work)
        return await self._workers.compile_grammar(work)

    def _check_size(self, prompt: Prompt, name: str) -> None:
        size = _text_size(prompt)
        limit = self._max_prompt_bytes
        if size > limit:
            raise RequestError(
                name, f"has {size} bytes of text; the limit is {limit} (--max-prompt-bytes)"
            )


def utf8_size(text: str) -> int:
    """Return the bytes of a text, which may hold half a surrogate pair, in UTF-8."""
    return len(text.encode("utf-8", "replace"))


def _text_size(prompt: Prompt) -> int:
    """Return the bytes of a text or of a conversation's values.

    0 for token ids, which the context bounds.
    """
    if isinstance(prompt, str):
        return utf8_size(prompt)
    if not is_conversation(prompt):
        return 0
    values = (value for message in prompt for value in message.values())  # type: ignore[union-attr]
    return sum(utf8_size(str(value)) for value in values)
