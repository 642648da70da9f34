"""The bodies of requests. A field that is null counts as left out, whatever it is."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)

from jaxserve.request import MAX_BIASES
from jaxserve.server.core.embedding import MAX_INPUTS
from jaxserve.server.http.errors import UnknownFieldError, UnsupportedError
from jaxserve.server.http.fields import IGNORED, ONLY
from jaxserve.server.http.json import dumps

MAX_PROMPTS = 64


def _whole(text: str) -> str:
    """Refuse half a surrogate pair: JSON can write one, UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} is half a surrogate pair; send both halves"
        ) from None
    return text


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any, limit: int) -> list[str | list[int]]:
    """One or several, as text or as token ids; the service looks at each id."""
    if isinstance(value, str) or (
        isinstance(value, list) and value and not isinstance(value[0], str | list)
    ):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError(
            "give a string, a list of strings, a list of token ids, or a list of such lists"
        )
    if len(value) > limit:
        raise ValueError(f"has {len(value)} entries; the limit is {limit}")
    kind = type(value[0])
    for i, prompt in enumerate(value):
        if type(prompt) is not kind:
            raise ValueError(
                f"entry {i} is of another kind than the first (all strings, or all lists of "
                f"token ids)"
            )
    return [_whole(prompt) if isinstance(prompt, str) else prompt for prompt in value]


def _biases(value: Any) -> dict[int, Any]:
    """Keys as token ids; the sampling parameters check the numbers."""
    if not isinstance(value, dict):
        raise ValueError("give an object of token ids and numbers")
    if len(value) > MAX_BIASES:
        raise ValueError(f"has {len(value)} entries; the limit is {MAX_BIASES}")
    for key in value:
        if not key.isascii() or not key.removeprefix("-").isdigit() or str(int(key)) != key:
            raise ValueError(f'has the key {key!r:.80}; keys are token ids, such as "50256"')
    return {int(key): bias for key, bias in value.items()}


Text = Annotated[str, AfterValidator(_whole)]
Texts = Annotated[list[str], Field(fail_fast=True), BeforeValidator(_listed)]
Ids = Annotated[list[int], Field(fail_fast=True)]
Biases = Annotated[dict[int, Any], PlainValidator(_biases)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class Body(BaseModel):
    """ignored, only: see fields.py. Types are never converted, but for integers where a number is
    asked for.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    ignored: ClassVar[Mapping[str, str]] = {}
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise ValueError("give an object")
        for name, value in given.items():
            if value is not None and name not in cls.model_fields and name not in cls.ignored:
                cls._check_only(name, value)
        return {
            name: value
            for name, value in given.items()
            if value is not None and name in cls.model_fields
        }

    @classmethod
    def _check_only(cls, name: str, value: Any) -> None:
        if name not in cls.only:
            raise UnknownFieldError(name[:80], "is not a field of this request; leave it out")
        if value not in cls.only[name]:
            accepted = " or ".join([*(dumps(value).decode() for value in cls.only[name]), "null"])
            raise UnsupportedError(name, f"is not supported; only {accepted} is accepted")


class StreamOptions(Body):
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: usage so far with every chunk


class Sampling(Body):
    """What both kinds of completion have; bounds are those of SamplingParams. Some fields are
    vLLM's.
    """

    ignored: ClassVar[Mapping[str, str]] = IGNORED
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = ONLY

    model: Text | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: Ids | None = None
    seed: int | None = None
    stop: Texts | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    cache_salt: Text = ""
    request_id: Text = ""
    response_format: dict[str, Any] | None = None


class CompletionBody(Sampling):
    prompt: Annotated[list[str | list[int]], PlainValidator(partial(_prompts, limit=MAX_PROMPTS))]
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None


class ChatBody(Sampling):
    messages: Objects
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Objects | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    separate_reasoning: bool = (
        True  # SGLang's: otherwise thoughts are a part of the content, marks and all
    )


class EmbeddingBody(Body):
    ignored: ClassVar[Mapping[str, str]] = IGNORED

    model: Text | None = None
    input: Annotated[list[str | list[int]], PlainValidator(partial(_prompts, limit=MAX_INPUTS))]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    priority: int = 0
    cache_salt: Text = ""
    request_id: Text = ""


class TokenizeBody(Body):
    model: Text | None = None
    prompt: Text | None = None
    messages: Objects | None = None


class DetokenizeBody(Body):
    model: Text | None = None
    tokens: Ids
