"""Translate checked bodies into the service's calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jaxserve.errors import ModelNotFoundError, RequestError
from jaxserve.prompts import Prompt
from jaxserve.sampling_params import SamplingFields, SamplingParams
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.chat_fields import conversation, tools_in
from jaxserve.server.http.errors import UnsupportedError
from jaxserve.server.http.response_format import structure_in
from jaxserve.server.http.thinking_fields import names_in_body, template_options
from jaxserve.server.http.types import SAME, ChatBody, CompletionBody, Sampling
from jaxserve.server.serving_state import ServingState

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions; chat has none


def check_model(name: str | None, served: ServingState) -> None:
    """Raise ModelNotFoundError unless the model of this name, or any model, is asked for."""
    if name is not None and name != served.model.name:
        raise ModelNotFoundError(
            f"the model {name!r:.200} does not exist; this server has {served.model.name!r}"
        )


def completion_calls(
    body: CompletionBody, request_id: str, timeout: float | None, defaults: SamplingFields
) -> list[IncomingRequest]:
    """Return one call for each prompt of the body.

    Args:
        defaults: Values of the sampling parameters that the body leaves open.
    """
    if body.best_of not in (None, body.n):
        raise UnsupportedError(
            "best_of", f"is {body.best_of}; only the value of n ({body.n}) is accepted"
        )
    _check_stream(body)
    params = _completion_sampling(body, defaults)
    if len(body.prompt) == 1:
        return [_call(body, body.prompt[0], "prompt", request_id, timeout, params)]
    calls = [
        _call(body, prompt, f"prompt[{i}]", f"{request_id}-{i}", timeout, params)
        for i, prompt in enumerate(body.prompt)
    ]
    return [replace(call, call_id=request_id) for call in calls]


def chat_calls(
    body: ChatBody, request_id: str, timeout: float | None, limits: Limits, defaults: SamplingFields
) -> list[IncomingRequest]:
    """Return the one call of a chat body, as a list like that of `completion_calls`."""
    _check_stream(body)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs", "is given without logprobs; set logprobs to true")
    params = sampling_of(
        body,
        defaults,
        max_tokens=_max_tokens(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    call = _call(body, conversation(body.messages), "messages", request_id, timeout, params)
    options = template_options(body)
    return [replace(call, tools=tools_in(body, limits), options=options)]


def _call(
    body: Sampling,
    prompt: Prompt,
    field: str,
    request_id: str,
    timeout: float | None,
    params: SamplingParams,
) -> IncomingRequest:
    return IncomingRequest(
        prompt=prompt,
        params=params,
        prompt_field=field,
        request_id=request_id,
        priority=body.priority,
        cache_salt=body.cache_salt,
        timeout=timeout,
    )


def scores_only(body: Sampling) -> bool:
    """Return whether only the prompt's log-probabilities are wanted: completions, max_tokens 0.

    The engine generates at least one token, so one is generated and left out of the reply.
    """
    return isinstance(body, CompletionBody) and _max_tokens(body) == 0


def _completion_sampling(body: CompletionBody, defaults: SamplingFields) -> SamplingParams:
    max_tokens = _max_tokens(body)
    if max_tokens is None:
        max_tokens = COMPLETION_TOKENS
    if scores_only(body):
        if body.stream or not body.echo:
            raise RequestError(
                "max_tokens", "is 0, which needs echo and no stream; give at least 1"
            )
        max_tokens = 1
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        # The echoed prompt carries log-probabilities too, so the engine has to compute them.
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return sampling_of(
        body,
        defaults,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=body.echo,
    )


def sampling_of(body: Sampling, defaults: SamplingFields, **given: Any) -> SamplingParams:
    """Return the sampling parameters of the body and of `given`, and `defaults` for all others."""
    given = {name: value for name, value in given.items() if value is not None}
    given |= {name: getattr(body, name) for name in SAME if getattr(body, name) is not None}
    given["n"] = body.n
    if body.top_k is not None:
        given["top_k"] = 0 if body.top_k == -1 else body.top_k  # vLLM turns top_k off by -1
    if body.include_stop_str_in_output is not None:
        given["include_stop"] = body.include_stop_str_in_output
    given["structure"] = structure_in(body.response_format)
    with body_field_names(body):
        return SamplingParams(**{**defaults, **given})


def _max_tokens(body: Sampling) -> int | None:
    """Return max_tokens under either of OpenAI's two names; RequestError where they differ."""
    older = body.max_tokens
    newer = body.max_completion_tokens
    if older is not None and newer is not None and older != newer:
        raise RequestError(
            "max_completion_tokens", f"is {newer}, and max_tokens is {older}; give one of them"
        )
    return newer if older is None else older


def _check_stream(body: Sampling) -> None:
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs", "cannot be streamed; leave out stream, or use echo with logprobs"
        )


@contextmanager
def body_field_names(body: Sampling) -> Iterator[None]:
    """Make RequestErrors of the block name a field as the body does, not as SamplingParams does."""
    names = {"include_stop": "include_stop_str_in_output"}
    if isinstance(body, ChatBody):
        names["logprobs"] = "top_logprobs"
        names |= names_in_body(body)
    if body.max_tokens is None and body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    try:
        yield
    except RequestError as error:
        if error.field not in names:
            raise
        raise type(error)(names[error.field], error.problem) from None
