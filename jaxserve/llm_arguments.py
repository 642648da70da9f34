"""Arguments of an LLM and of its calls, in every form that is taken."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Integral
from typing import Any, cast

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.chat import Message, TemplateFields, TemplateOptions
from jaxserve.config import EngineOptions
from jaxserve.errors import ConfigError, RequestError
from jaxserve.names_elsewhere import LLM_KEYWORDS, Names
from jaxserve.prompts import Prompt
from jaxserve.sampling_params import SamplingFields, SamplingParams
from jaxserve.sharding.mesh import MeshSpec

TEMPLATE_FIELDS = frozenset(TemplateFields.__annotations__)
# What to use for a keyword that LLM does not have, fields of its options among them.
OTHER_KEYWORDS: Names = {
    **{f.name: f"use SamplingParams({f.name}=...)" for f in fields(SamplingParams)},
    **{f.name: f"use options=EngineOptions({f.name}=...)" for f in fields(EngineOptions)},
    **LLM_KEYWORDS,
}


def mesh_of(mesh: MeshSpec | None, data: int, expert: int, tensor: int) -> MeshSpec:
    """Return the mesh, however it was given; ConfigError if it was given twice."""
    axes = MeshSpec(data=data, expert=expert, tensor=tensor)
    if mesh and axes != MeshSpec():
        raise ConfigError(f"mesh {mesh} is given, and {axes} as data, expert, tensor; give one")
    return mesh or axes


def options_of(options: EngineOptions | None, max_context: int | None) -> EngineOptions:
    """Return the options with max_context; ConfigError if options have another one."""
    options = options or EngineOptions()
    if max_context is None:
        return options
    if options.max_context not in (None, max_context):
        raise ConfigError(
            f"max_context is {max_context}, and {options.max_context} in options; give one"
        )
    return replace(options, max_context=max_context)


def dtype_name(dtype: DTypeLike) -> str:
    """Return the name of a dtype that is given by its name, or as jnp.bfloat16 is."""
    return dtype if isinstance(dtype, str) else jnp.dtype(dtype).name


def named_prompts(prompts: str | Iterable[Prompt]) -> dict[str, Prompt]:
    """Return the prompts by their names for errors, which are prompts[0] etc.

    RequestError is raised for what is no list of prompts: one conversation, the token ids of one
    prompt, or an object that holds a prompt.
    """
    if isinstance(prompts, str):
        return {"prompts": prompts}
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise RequestError("prompts", f"is {prompts!r:.80}; give a text, or a list of prompts")
    named = {f"prompts[{i}]": prompt for i, prompt in enumerate(prompts)}
    for name, prompt in named.items():
        _check_one(name, prompt)
    return named


def _check_one(name: str, prompt: object) -> None:
    """Raise RequestError for what may stand inside of a prompt, but is none."""
    if isinstance(prompt, Mapping) and "role" in prompt:
        hint = "give one conversation to chat, and several to generate as a list of lists"
    elif isinstance(prompt, Mapping):
        hint = "give the text, or the list of token ids, itself"
    elif isinstance(prompt, Integral):
        hint = "give the token ids of one prompt as a list in the list of prompts"
    else:
        return
    raise RequestError(name, f"is {prompt!r:.80}; {hint}")


def named_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> dict[str, Sequence[Message]]:
    """Return the conversations by their names for errors: messages, or messages[0] etc."""
    several = isinstance(messages, Sequence) and all(isinstance(m, list | tuple) for m in messages)
    conversations = cast(Any, messages)
    if several and conversations:
        return {f"messages[{i}]": m for i, m in enumerate(conversations)}
    return {"messages": conversations}


def params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, sampling: SamplingFields, count: int
) -> list[SamplingParams]:
    """Return the sampling parameters of each of `count` prompts.

    Args:
        params: Parameters of all prompts, or one per prompt; None is the default.
        sampling: Fields that override those of `params`.

    Raises:
        RequestError: The parameters are of another type or number.
    """
    if isinstance(params, list | tuple):
        if len(params) != count:
            problem = f"has {len(params)} entries for {count} prompts; give one per prompt"
            raise RequestError("params", f"{problem}, or one for all")
        return [params_of(each, sampling, f"params[{i}]") for i, each in enumerate(params)]
    return [params_of(params, sampling)] * count


class ChatFields(SamplingFields, TemplateFields, total=False):
    """Keywords of a call about a conversation."""


def split_fields(given: ChatFields) -> tuple[TemplateOptions, SamplingFields]:
    """Return the options of an answer, and the sampling parameters, among keywords of a call."""
    options = {name: value for name, value in given.items() if name in TEMPLATE_FIELDS}
    sampling = {name: value for name, value in given.items() if name not in TEMPLATE_FIELDS}
    return TemplateOptions(**cast(Any, options)), cast(SamplingFields, sampling)


def params_of(params: object, sampling: SamplingFields, name: str = "params") -> SamplingParams:
    """Return the parameters of one prompt; RequestError if they are of another type."""
    if params is None:
        return SamplingParams(**sampling)
    if not isinstance(params, SamplingParams):
        problem = f"is {params!r:.80}; give SamplingParams, or its fields as keywords"
        raise RequestError(name, problem)
    return replace(params, **sampling)
