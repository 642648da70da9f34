"""From checked bodies to the service's calls."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from jaxserve.errors import ModelNotFoundError, RequestError
from jaxserve.prompts import Prompt
from jaxserve.request import SamplingParams
from jaxserve.server.core.incoming_request import Call
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.body import read
from jaxserve.server.http.errors import UnknownFieldError, UnsupportedError
from jaxserve.server.http.structure import structure_in
from jaxserve.server.http.tools import tools_in
from jaxserve.server.http.types import Body, ChatBody, CompletionBody, Sampling
from jaxserve.server.serving_state import Served

SAME = (  # in the body as in SamplingParams
    *(
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ),
    *(
        "logit_bias",
        "allowed_token_ids",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "min_tokens",
        "n",
    ),
)
COMPLETION_TOKENS = 16  # max_tokens that were left out, in completions: OpenAI's default
TIMEOUT = "x-request-timeout"


def check_model(name: str | None, served: Served) -> None:
    if name is not None and name != served.model.name:
        raise ModelNotFoundError(
            f"the model {name!r:.200} does not exist; {served.model.name!r} is served here"
        )


def completion_calls(body: CompletionBody, request_id: str, timeout: float | None) -> list[Call]:
    """One for each prompt."""
    if body.best_of not in (None, body.n):
        raise UnsupportedError(
            "best_of", f"is {body.best_of}; only the same as n ({body.n}) is accepted"
        )
    _check_stream(body)
    params = _completion_sampling(body)
    if len(body.prompt) == 1:
        return [_call(body, body.prompt[0], "prompt", request_id, timeout, params)]
    return [
        _call(body, prompt, f"prompt[{i}]", f"{request_id}-{i}", timeout, params)
        for i, prompt in enumerate(body.prompt)
    ]


def chat_calls(
    body: ChatBody, request_id: str, timeout: float | None, limits: Limits
) -> list[Call]:
    _check_stream(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs", "is given without logprobs; set logprobs to true")
    params = sampling_of(
        body,
        max_tokens=_max_tokens(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    call = _call(body, conversation(body.messages), "messages", request_id, timeout, params)
    return [replace(call, tools=tools_in(body, limits))]


def _call(
    body: Sampling,
    prompt: Prompt,
    field: str,
    request_id: str,
    timeout: float | None,
    params: SamplingParams,
) -> Call:
    return Call(
        prompt=prompt,
        params=params,
        prompt_field=field,
        request_id=request_id,
        priority=body.priority,
        cache_salt=body.cache_salt,
        timeout=timeout,
    )


def scores_only(body: Sampling) -> bool:
    """max_tokens 0: one token is generated, and forgotten, as the prompt's log-probabilities come
    with it.
    """
    return isinstance(body, CompletionBody) and _max_tokens(body) == 0


def _completion_sampling(body: CompletionBody) -> SamplingParams:
    max_tokens, prompt_logprobs = _max_tokens(body), body.prompt_logprobs
    if scores_only(body) and (body.stream or not body.echo):
        raise RequestError("max_tokens", "is 0, which needs echo and no stream; give at least 1")
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return sampling_of(
        body,
        max_tokens=COMPLETION_TOKENS if max_tokens is None else max_tokens or 1,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=body.echo,
    )


def sampling_of(body: Sampling, **given: Any) -> SamplingParams:
    """What was set; the rest by default."""
    given |= {name: getattr(body, name) for name in SAME if getattr(body, name) is not None}
    if body.top_k is not None:
        given["top_k"] = 0 if body.top_k == -1 else body.top_k  # vLLM's way to say: off
    if body.include_stop_str_in_output is not None:
        given["include_stop"] = body.include_stop_str_in_output
    given["structure"] = structure_in(body.response_format)
    with naming(body):
        return SamplingParams(**given)


def _max_tokens(body: Sampling) -> int | None:
    older, newer = body.max_tokens, body.max_completion_tokens
    if older is not None and newer is not None and older != newer:
        raise RequestError(
            "max_completion_tokens", f"is {newer}, and max_tokens is {older}; give one of them"
        )
    return newer if older is None else older


def _check_stream(body: Sampling) -> None:
    if body.stream_options and not body.stream:
        raise RequestError("stream_options", "is given without stream; set stream to true")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs", "come with whole answers only; leave out stream, or see echo"
        )


@contextmanager
def naming(body: Sampling) -> Iterator[None]:
    """Errors name the fields as this body does."""
    names = {"include_stop": "include_stop_str_in_output"}
    if isinstance(body, ChatBody):
        names["logprobs"] = "top_logprobs"
    if body.max_tokens is None and body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    try:
        yield
    except RequestError as error:
        error.rename(names.get(error.field, error.field))
        raise


def conversation(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose parts of text are one text. The service looks at the rest."""
    if not messages:
        raise RequestError("messages", "is empty; give at least one message")
    return [
        message | {"content": _joined(message["content"], f"messages[{i}].content")}
        if isinstance(message.get("content"), list)
        else message
        for i, message in enumerate(messages)
    ]


def _joined(parts: list[Any], path: str) -> str:
    """The texts, with nothing between them."""
    for i, part in enumerate(parts):
        where = f"{path}[{i}]"
        if not isinstance(part, dict):
            raise RequestError(where, 'is no object; give {"type": "text", "text": ...}')
        if part.get("type") != "text":
            raise UnsupportedError(
                f"{where}.type", f"is {part.get('type')!r:.80}; only text is supported"
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}.text", "is no string")
        for name in part.keys() - {"type", "text"}:
            if part[name] is not None:
                raise UnknownFieldError(
                    f"{where}.{name:.80}", "is not a field of a text; leave it out"
                )
    return "".join(part["text"] for part in parts)


async def body_of[T: Body](
    request: Request, kind: type[T], limits: Limits
) -> tuple[T, float | None]:
    """The body, and the seconds that the client still waits."""
    timeout, began = timeout_of(request), time.monotonic()
    body = await read(request, kind, limits)
    return body, None if timeout is None else timeout - (time.monotonic() - began)


def timeout_of(request: Request) -> float | None:
    """Seconds that the client will wait, if it says so."""
    given = request.headers.get(TIMEOUT)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise RequestError(TIMEOUT, f"is {given!r:.80}; give seconds above 0")
    return seconds
