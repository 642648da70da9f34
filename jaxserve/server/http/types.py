"""Models of request bodies.

A field that is null counts as left out. A field that is neither in a model, in IGNORED nor in ONLY
is an error: no field is dropped silently.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, PlainValidator, create_model, model_validator

from jaxserve.sampling_params import SamplingParams
from jaxserve.server.core.embedding import MAX_INPUTS
from jaxserve.server.http.errors import UnknownFieldError, UnsupportedError
from jaxserve.server.http.field_types import Biases, Ids, Objects, Text, Texts, prompts
from jaxserve.server.http.json import dumps
from jaxserve.server.http.other_fields import IGNORED, ONLY, OTHER_NAMES

MAX_PROMPTS = 64  # of one request to /v1/completions
INTEGERS = (int, int | None)


class Body(BaseModel):
    """A request's body. Types are never converted, except a whole number to the other kind.

    `ignored` has fields that are accepted without effect, each with the reason; `only` has fields
    of which some values are accepted.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    ignored: ClassVar[Mapping[str, str]] = {}
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise ValueError("must be an object")
        for name, value in given.items():
            if value is not None and name not in cls.model_fields and name not in cls.ignored:
                cls._check_only(name, value)
        return {
            name: cls._whole(name, value)
            for name, value in given.items()
            if value is not None and name in cls.model_fields
        }

    @classmethod
    def _whole(cls, name: str, value: Any) -> Any:
        """Return a float such as 1.0 as an integer where the field is one."""
        is_whole = isinstance(value, float) and value.is_integer()
        return int(value) if is_whole and cls.model_fields[name].annotation in INTEGERS else value

    @classmethod
    def _check_only(cls, name: str, value: Any) -> None:
        if name not in cls.only:
            other = OTHER_NAMES.get(name)
            advice = "leave it out"
            if other in cls.model_fields:
                advice = f"use {other}"
            raise UnknownFieldError(name[:80], f"is not a field of this request; {advice}")
        if value not in cls.only[name]:
            accepted = " or ".join([*(dumps(value).decode() for value in cls.only[name]), "null"])
            raise UnsupportedError(name, f"is not supported; only {accepted} is accepted")


class StreamOptions(Body):
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: every chunk has the usage so far


# Types in SamplingParams -> types in a body.
BODY_TYPES: Mapping[Any, Any] = MappingProxyType(
    {
        Mapping[int, float]: Biases,
        Sequence[int]: Ids,
        Sequence[int] | None: Ids,
        Sequence[str]: Texts,
    }
)
# Parameters that have other names in a body, or another type, or that code here reads.
DECLARED = frozenset(
    {
        *("max_tokens", "top_k", "n", "include_stop", "structure"),
        *("echo", "logprobs", "prompt_logprobs"),
    }
)
# Parameters with the same name, meaning and bounds in a body; None where a body leaves one out.
SAME = tuple(field.name for field in fields(SamplingParams) if field.name not in DECLARED)


def _same_fields() -> dict[str, Any]:
    """Return the fields of SAME as create_model takes them: type and default by name."""
    types = get_type_hints(SamplingParams)
    return {name: (BODY_TYPES.get(types[name], types[name]) | None, None) for name in SAME}


SameFields = create_model("SameFields", __base__=Body, **_same_fields())


class Sampling(SameFields):
    """Fields of both kinds of completion, OpenAI's and some of vLLM's, beside those of SAME.

    SamplingParams checks their bounds.
    """

    ignored: ClassVar[Mapping[str, str]] = IGNORED
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = ONLY

    model: Text | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    top_k: int | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    cache_salt: Text = ""
    request_id: Text = ""
    response_format: dict[str, Any] | None = None


class TemplateBody(Body):
    """Fields of bodies with a conversation that work by the chat template, see TemplateOptions."""

    reasoning_effort: Text | None = None
    verbosity: Text | None = None
    enable_thinking: bool | None = None
    thinking_budget: int | None = None
    thinking: dict[str, Any] | None = None  # Anthropic's form of the two before
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(Sampling):
    prompt: Annotated[list[str | list[int]], PlainValidator(partial(prompts, limit=MAX_PROMPTS))]
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None


class ChatBody(Sampling, TemplateBody):
    messages: Objects
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Objects | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    # SGLang's: false leaves the reasoning in the content, with its marks.
    separate_reasoning: bool = True


class EmbeddingBody(Body):
    ignored: ClassVar[Mapping[str, str]] = IGNORED

    model: Text | None = None
    input: Annotated[list[str | list[int]], PlainValidator(partial(prompts, limit=MAX_INPUTS))]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    priority: int = 0
    cache_salt: Text = ""
    request_id: Text = ""


class TokenizeBody(TemplateBody):
    """Body of vLLM's /tokenize: a prompt or a conversation."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    # Of a prompt: with BOS and EOS as the checkpoint says, by default. Templates write their own.
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True  # of messages: the assistant's turn is opened
    return_token_strs: bool = False


class DetokenizeBody(Body):
    model: Text | None = None
    tokens: Ids
