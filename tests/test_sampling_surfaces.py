"""Every public surface takes every field of SamplingParams, or says here why it lacks it.

A value is written as a user of the surface writes it, and read as the engine gets it. A new field
of SamplingParams fails here until EXAMPLES has a value of it, and until each surface takes it.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, make_dataclass, replace
from typing import Any, get_type_hints

import pytest
from google.protobuf.message import Message
from smg_grpc_proto import vllm_engine_pb2

from jaxserve import LLM
from jaxserve.cli.sampling_flags import sampling_fields
from jaxserve.client import flags as client_flags
from jaxserve.client.messages import Options, generation_message
from jaxserve.config.option import flag_of
from jaxserve.errors import JaxserveError
from jaxserve.generate import flags as of_generate
from jaxserve.sampling_params import SamplingFields, SamplingParams
from jaxserve.server.core.limits import Limits
from jaxserve.server.grpc.parse import parse_request
from jaxserve.server.grpc.vllm_parse import parse_generate
from jaxserve.server.http.calls import chat_calls, completion_calls
from jaxserve.server.http.types import ChatBody, CompletionBody
from jaxserve.structure import Structure
from jaxserve.v1 import common_pb2, inference_pb2

# One value of each field that is not the default; a float32 can hold the fractions.
EXAMPLES: Mapping[str, Any] = {
    "max_tokens": 9,
    "min_tokens": 2,
    "temperature": 0.5,
    "seed": 77,
    "top_k": 7,
    "top_p": 0.75,
    "min_p": 0.125,
    "repetition_penalty": 1.25,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {5: 1.5},
    "allowed_token_ids": (4, 5),
    "stop": ("end",),
    "stop_token_ids": (6, 7),
    "include_stop": True,
    "ignore_eos": True,
    "n": 2,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "structure": Structure.of("json_object", True),
    "echo": True,
}
NO_DEFAULTS = SamplingFields()
# What a model's generation_config.json may say.
OF_THE_MODEL = SamplingFields(
    temperature=0.5, top_k=20, top_p=0.75, min_p=0.125, repetition_penalty=1.25
)
NO_TEXT = "the router in front of this surface makes the text, and can begin it with the prompt"

# Fields that a surface lacks on purpose, each with the reason.
LACKS: Mapping[str, Mapping[str, str]] = {
    "HTTP chat": {"echo": "OpenAI's chat has none: a conversation is no text that goes on"},
    "vLLM's gRPC": {
        "allowed_token_ids": "vLLM's message has none; what it cannot say is not invented",
        "echo": NO_TEXT,
    },
}


# ---- surfaces: each takes one field by its name, and returns what reaches the engine


def grpc(name: str, value: Any, defaults: SamplingFields = NO_DEFAULTS) -> SamplingParams:
    """Send the field to jaxserve.v1, as a client in another language would."""
    if name == "structure":
        name, value = value.kind, True
    if name == "allowed_token_ids":
        value = common_pb2.TokenIds(ids=value)
    sampling = common_pb2.SamplingParams(**{name: value})
    message = inference_pb2.GenerateRequest(text="hi", sampling=sampling)
    return parse_request(_travelled(message), Limits(), defaults).params


def client(name: str, value: Any, defaults: SamplingFields = NO_DEFAULTS) -> SamplingParams:
    """Give the field to a method of jaxserve.client, whose keywords are typed."""
    assert name in get_type_hints(Options)
    options: Any = {name: value}
    message = generation_message(inference_pb2.GenerateRequest, {"text": "hi"}, None, options)
    return parse_request(_travelled(message), Limits(), defaults).params


def _travelled[M: Message](message: M) -> M:
    return type(message).FromString(message.SerializeToString())


def completions(name: str, value: Any, defaults: SamplingFields = NO_DEFAULTS) -> SamplingParams:
    body = CompletionBody.model_validate(_json({"prompt": "hi"} | _http_field(name, value)))
    return completion_calls(body, "id", None, defaults)[0].params


def chat(name: str, value: Any, defaults: SamplingFields = NO_DEFAULTS) -> SamplingParams:
    given = _http_field(name, value)
    if name == "logprobs":
        given = {"logprobs": True, "top_logprobs": value}
    messages = [{"role": "user", "content": "hi"}]
    body = ChatBody.model_validate(_json({"messages": messages} | given))
    return chat_calls(body, "id", None, Limits(), defaults)[0].params


def _http_field(name: str, value: Any) -> dict[str, Any]:
    if name == "structure":
        return {"response_format": {"type": value.kind}}
    if name == "include_stop":
        return {"include_stop_str_in_output": value}  # vLLM's name
    return {name: value}


def _json(body: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(body))


def vllm(name: str, value: Any) -> SamplingParams:
    if name == "structure":
        name, value = value.kind, True
    if name == "include_stop":
        name = "include_stop_str_in_output"
    sampling = vllm_engine_pb2.SamplingParams(**{name: value})
    message = vllm_engine_pb2.GenerateRequest(text="hi", sampling_params=sampling)
    return parse_generate(_travelled(message)).params


def generate_flags(name: str, value: Any) -> SamplingParams:
    options = of_generate.parse(_arguments(name, value))
    return SamplingParams(**sampling_fields(options.sampling, as_json=True))


def flags_of_client(name: str, value: Any) -> SamplingParams:
    options = client_flags.parse(_arguments(name, value))
    return SamplingParams(**sampling_fields(options.sampling, as_json=True))


def _arguments(name: str, value: Any) -> list[str]:
    """Return a command's arguments for the field; those for what is reported need --json."""
    if name == "structure":
        return [flag_of(value.kind)]
    if value is True:
        return [flag_of(name)]
    if isinstance(value, dict):
        text = json.dumps(value)
    elif isinstance(value, tuple):
        text = ",".join(map(str, value))
    else:
        text = str(value)
    return ["--json", f"{flag_of(name)}={text}"]


SURFACES: Mapping[str, Callable[[str, Any], SamplingParams]] = {
    "gRPC": grpc,
    "jaxserve.client": client,
    "HTTP completions": completions,
    "HTTP chat": chat,
    "vLLM's gRPC": vllm,
    "flags of generate": generate_flags,
    "flags of the client": flags_of_client,
}


# ---- tests


def lost(surface: str, params: type, examples: Mapping[str, Any]) -> set[str]:
    """Return the fields whose values do not come through the surface."""
    return {
        field.name
        for field in fields(params)
        if not _passes(SURFACES[surface], field.name, examples[field.name])
    }


def _passes(surface: Callable[[str, Any], SamplingParams], name: str, value: Any) -> bool:
    try:
        found = getattr(surface(name, value), name)
    # As they refuse what they do not know: a RequestError, protobuf's and pydantic's errors, an
    # argument parser's exit.
    except (JaxserveError, ValueError, TypeError, AssertionError, SystemExit):
        return False
    if isinstance(value, Structure):
        return isinstance(found, Structure) and (found.kind, found.text) == (value.kind, value.text)
    return found == value


def test_the_examples_are_of_every_field_and_no_defaults() -> None:
    assert [field.name for field in fields(SamplingParams)] == list(EXAMPLES)
    defaults = SamplingParams()
    assert all(getattr(defaults, name) != value for name, value in EXAMPLES.items())


@pytest.mark.parametrize("surface", SURFACES)
def test_every_field_comes_through(surface: str) -> None:
    """Those that are lacking are exactly those that have a reason."""
    assert lost(surface, SamplingParams, EXAMPLES) == LACKS.get(surface, {}).keys()


@pytest.mark.parametrize("surface", SURFACES)
def test_a_new_field_is_missed(surface: str) -> None:
    """The test above notices what it is for."""
    wider = make_dataclass(
        "Wider", [("typical_p", float, 1.0)], bases=(SamplingParams,), frozen=True, kw_only=True
    )
    found = lost(surface, wider, {**EXAMPLES, "typical_p": 0.5})
    assert found == {"typical_p", *LACKS.get(surface, {})}


@pytest.mark.parametrize("surface", [grpc, client, completions, chat])
def test_what_a_request_leaves_open_is_the_models(
    surface: Callable[..., SamplingParams],
) -> None:
    found = surface("seed", 77, OF_THE_MODEL)
    expected = replace(SamplingParams(seed=77), **OF_THE_MODEL)
    if surface is completions:  # OpenAI's own default of this endpoint
        expected = replace(expected, max_tokens=16)
    assert found == expected
    for name in OF_THE_MODEL:
        plain = getattr(SamplingParams(), name)
        assert surface(name, plain, OF_THE_MODEL) == replace(
            expected, **{name: plain, "seed": None}
        ), "our own default, once it is said, counts"


def test_sampling_params_of_the_client_say_all() -> None:
    message = generation_message(
        inference_pb2.GenerateRequest, {"text": "hi"}, SamplingParams(seed=77), {"top_k": 3}
    )
    found = parse_request(_travelled(message), Limits(), OF_THE_MODEL).params
    assert found == SamplingParams(seed=77, top_k=3)


@pytest.mark.parametrize("method", [LLM.generate, LLM.chat, LLM.stream])
def test_the_llm_takes_the_class_itself(method: Callable[..., Any]) -> None:
    """It therefore has every field."""
    hint = inspect.signature(method).parameters["params"].annotation
    assert hint in (SamplingParams | None, SamplingParams | Sequence[SamplingParams] | None)
