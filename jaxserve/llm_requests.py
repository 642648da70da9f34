"""Requests of an LLM's calls: prompts in every form, tokenized and checked."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from jaxserve.call_guard import CallGuard
from jaxserve.chat import Chat, Message, Rendered, TemplateOptions
from jaxserve.config import EngineConfig
from jaxserve.engine.request_limits import max_new_tokens
from jaxserve.errors import RequestError
from jaxserve.llm_arguments import (
    TEMPLATE_FIELDS,
    ChatFields,
    params_of,
    params_of_each,
    split_fields,
)
from jaxserve.loading.folder import Model
from jaxserve.prompts import Prepared, Prompt, Prompts, is_conversation
from jaxserve.sampling_params import SamplingFields, SamplingParams
from jaxserve.structure.grammars import Bounds, Grammars


def prompts_of(model: Model, chat: Chat, config: EngineConfig, bounds: Bounds) -> Prompts:
    """Make what checks prompts of a loaded model, and compiles their grammars."""
    vocab_size = model.spec.vocab_size
    return Prompts(
        model.tokenizer,
        chat,
        model.eos_ids,
        vocab_size,
        config.max_context,
        config.capacity,
        partial(max_new_tokens, config),
        Grammars(model.tokenizer, model.eos_ids, vocab_size, bounds),
        config.embeds,
    )


class RequestMaker:
    """Maker of an LLM's requests, which have ids of their own. Any thread may use it.

    Args:
        prompts: Tokenizer, chat template and limits of the model.
        guard: Guard of the LLM's calls, which ends the work between two prompts.
        check_usable: Function that raises EngineError if no call can run any more.
    """

    def __init__(self, prompts: Prompts, guard: CallGuard, check_usable: Callable[[], None]):
        self._prompts = prompts
        self._guard = guard
        self._check_usable = check_usable
        self._numbers = itertools.count(1)  # of requests, which are their ids

    def of_prompts(
        self,
        named: Mapping[str, Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        sampling: SamplingFields,
    ) -> list[Prepared]:
        """Tokenize and check prompts of any kind, given by their names for errors."""
        self._check_use(embed=False)
        return self._check_each(self._encode(named), params, sampling)

    def of_conversations(
        self,
        named: Mapping[str, Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        fields: ChatFields,
    ) -> list[Prepared]:
        """Render, tokenize and check conversations, given by their names for errors."""
        options, sampling = split_fields(fields)
        self._check_use(embed=False)
        rendered = {}
        for name, conversation in named.items():
            self._guard.pass_on()
            rendered[name] = self._prompts.chat.render(conversation, name, options=options)
        return self._check_each(rendered, params, sampling)

    def of_prompt(
        self, name: str, prompt: Prompt, params: SamplingParams | None, fields: ChatFields
    ) -> Prepared:
        """Tokenize and check a prompt of any kind, given by its name for errors."""
        options, sampling = split_fields(fields)
        if options != TemplateOptions() and not is_conversation(prompt):
            problem = "is for a conversation, and the prompt is none (leave it out)"
            raise RequestError(next(name for name in fields if name in TEMPLATE_FIELDS), problem)
        self._check_use(embed=False)
        rendered = self._prompts.encode(prompt, name, options=options)
        return self._check_one(rendered, params_of(params, sampling), name)

    def to_embed(self, named: Mapping[str, Prompt]) -> list[Prepared]:
        """Tokenize and check what is to be embedded, given by the names for errors."""
        self._check_use(embed=True)
        for name, prompt in named.items():
            if is_conversation(prompt):
                raise RequestError(name, "is a conversation; give a text or its token ids")
        return self._check_each(self._encode(named), None, {})

    def _check_use(self, embed: bool) -> None:
        """Raise an error when the engine is closed, or the model does not do what is asked."""
        self._check_usable()
        self._prompts.check_purpose(embed)

    def _encode(self, named: Mapping[str, Prompt]) -> dict[str, Rendered]:
        encoded = {}
        for name, prompt in named.items():
            self._guard.pass_on()
            encoded[name] = self._prompts.encode(prompt, name)
        return encoded

    def _check_each(
        self,
        prompts: Mapping[str, Rendered],
        params: SamplingParams | Sequence[SamplingParams] | None,
        sampling: SamplingFields,
    ) -> list[Prepared]:
        each = params_of_each(params, sampling, len(prompts))
        return list(map(self._check_one, prompts.values(), each, prompts))

    def _check_one(self, prompt: Rendered, params: SamplingParams, name: str) -> Prepared:
        """Compile the grammar, if any, and check the request under an id of its own."""
        self._guard.pass_on()
        id = str(next(self._numbers))
        params = self._prompts.constrain(prompt, params)
        grammar = self._prompts.grammars.compile(params.structure) if params.structure else None
        return self._prompts.check(prompt, params, name, id=id, grammar=grammar)
