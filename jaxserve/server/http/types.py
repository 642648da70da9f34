"""Models of request bodies, and the fields of OpenAI's API that are accepted without effect.

A field that is null counts as left out. A field that is neither in a model, in IGNORED nor in ONLY
is an error: no field is dropped silently.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    create_model,
    model_validator,
)

from jaxserve.sampling_params import MAX_BIASES, SamplingParams
from jaxserve.server.core.embedding import MAX_INPUTS
from jaxserve.server.http.errors import UnknownFieldError, UnsupportedError
from jaxserve.server.http.json import dumps

MAX_PROMPTS = 64  # of one request to /v1/completions

# Fields that have no effect here, each with the reason.
IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "user": "who asks: nothing here counts or bills by person",
        "safety_identifier": "who asks, as a hash: nothing here counts or bills by person",
        "metadata": "labels of a stored completion: nothing is stored",
        "prompt_cache_key": "a hint about which prompts share a beginning: the cache finds that "
        "out (cache_salt separates)",
        "prompt_cache_options": "how to cache prompts: pages are shared whenever they can be",
        "prompt_cache_retention": "how long prompts stay cached: as long as there is room",
        "service_tier": "how fast the answer shall be: `priority` says that here",
        "store": "whether OpenAI keeps the answer: nothing is stored",
        "prediction": "a text that the answer may resemble: drafts come from elsewhere here",
    }
)

# Fields by which other servers know what has another name here.
OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("guided_json", "guided_regex", "guided_choice"), "response_format"),
        **dict.fromkeys(("guided_grammar", "structured_outputs"), "response_format"),
        **dict.fromkeys(("json_schema", "regex", "ebnf", "grammar"), "response_format"),
        **dict.fromkeys(("format", "structural_tag"), "response_format"),
        **dict.fromkeys(("max_new_tokens", "max_output_tokens"), "max_tokens"),
        **dict.fromkeys(("max_length", "n_predict", "num_predict"), "max_tokens"),
        **dict.fromkeys(("min_new_tokens", "min_length"), "min_tokens"),
        **dict.fromkeys(("stop_sequences", "stop_words"), "stop"),
        "repeat_penalty": "repetition_penalty",
        **dict.fromkeys(("random_seed", "sampling_seed"), "seed"),
        "do_sample": "temperature",
        "num_return_sequences": "n",
        "no_stop_trim": "include_stop_str_in_output",
        "return_logprob": "logprobs",
        "top_logprobs_num": "top_logprobs",
        "logprob_start_len": "prompt_logprobs",
        "rid": "request_id",
        **dict.fromkeys(("thinking_token_budget", "max_thinking_tokens"), "thinking_budget"),
        "system": "messages",
    }
)

# Fields of which only the values that ask for the usual behaviour are accepted, and null.
ONLY: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "parallel_tool_calls": (True, False),  # without tools, either value changes nothing
        "reasoning_effort": ("none",),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "suffix": ("",),
        "tool_choice": ("none",),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
)


# Validators raise ValueError with a text that continues the field's name: "has 3 entries; ...".


def _no_lone_surrogate(text: str) -> str:
    """Refuse half a surrogate pair: JSON can write one, UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"has half a surrogate pair at character {error.start}; send both halves"
        ) from None
    return text


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any, limit: int) -> list[str | list[int]]:
    """Return one or several prompts, each a text or token ids, as a list.

    The service checks the ids themselves.
    """
    if _is_one_prompt(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError(
            "must be a string, a list of strings, a list of token ids, or a list of such lists"
        )
    if len(value) > limit:
        raise ValueError(f"has {len(value)} entries; the limit is {limit}")
    kind = type(value[0])
    for i, prompt in enumerate(value):
        if type(prompt) is not kind:
            raise ValueError(
                f"has an entry {i} of another kind than the first; all must be strings, or all "
                f"lists of token ids"
            )
    return [_no_lone_surrogate(prompt) if isinstance(prompt, str) else prompt for prompt in value]


def _is_one_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    # A list that begins with neither a string nor a list is one prompt of token ids.
    return isinstance(value, list) and bool(value) and not isinstance(value[0], str | list)


def _biases(value: Any) -> dict[int, Any]:
    """Return the biases by token id; SamplingParams checks the numbers."""
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    if len(value) > MAX_BIASES:
        raise ValueError(f"has {len(value)} entries; the limit is {MAX_BIASES}")
    for key in value:
        if not _is_integer(key):
            raise ValueError(f'has the key {key!r:.80}; keys are token ids, such as "50256"')
    return {int(key): bias for key, bias in value.items()}


def _is_integer(text: str) -> bool:
    """Return whether the text is an integer exactly as Python writes it: not "+1", not "01"."""
    return text.isascii() and text.removeprefix("-").isdigit() and str(int(text)) == text


Text = Annotated[str, AfterValidator(_no_lone_surrogate)]
Texts = Annotated[list[str], Field(fail_fast=True), BeforeValidator(_listed)]
Ids = Annotated[list[int], Field(fail_fast=True)]
Biases = Annotated[dict[int, Any], PlainValidator(_biases)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
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
    prompt: Annotated[list[str | list[int]], PlainValidator(partial(_prompts, limit=MAX_PROMPTS))]
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
    input: Annotated[list[str | list[int]], PlainValidator(partial(_prompts, limit=MAX_INPUTS))]
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
