"""Requests over HTTP as OpenAI has them: POST completions with token ids or a text, streamed.

Servers are asked to say with every chunk how many tokens there are so far (continuous_usage_stats:
jaxserve, vLLM and SGLang do). Where one does not, the tokens that it reports in the end, or else
one for each chunk, are shared out evenly over the chunks, and the outcome says so. A chunk comes
when there is text: tokens that spell none yet are counted with the next one that does.
"""

import json
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from jaxserve.bench.caller import CUT, Credentials, Refused
from jaxserve.bench.latency import Outcome
from jaxserve.client.channel import metadata_of
from jaxserve.errors import ConfigError

MALFORMED = "MALFORMED"  # not what OpenAI's API says
SECONDS = 30.0  # for a server to list its models
REFUSALS = (401, 403)  # for want of credentials


@dataclass(frozen=True)
class Model:
    """One that a server offers. max_context: tokens; None where it does not say: OpenAI's API has
    no field for it.
    """

    name: str
    max_context: int | None


class OpenAICaller:
    """strict: send only what OpenAI's own API knows."""

    def __init__(self, client: httpx.AsyncClient, model: str, ignore_eos: bool, strict: bool):
        self._client, self._model = client, model
        self._ignore_eos, self._strict = ignore_eos, strict

    def prepare(self, prompt: Sequence[int] | str, output_tokens: int, salt: str) -> bytes:
        usage: dict[str, Any] = {"include_usage": True}
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": usage,
        }
        if not self._strict:
            usage["continuous_usage_stats"] = True
            body |= {"ignore_eos": self._ignore_eos, "cache_salt": salt}
        return json.dumps(body).encode()

    async def ask(self, request: bytes, outcome: Outcome) -> None:
        headers = {"content-type": "application/json"}
        try:
            async with self._client.stream(
                "POST", "completions", content=request, headers=headers
            ) as response:
                if response.status_code != 200:
                    raise refused_by(response.status_code, await response.aread())
                await _read(response, outcome)
        except httpx.HTTPError as error:
            raise Refused(type(error).__name__, str(error)) from None
        except (ValueError, TypeError, AttributeError) as error:
            raise Refused(MALFORMED, f"a chunk is not as OpenAI's API says: {error}") from None


async def _read(response: httpx.Response, outcome: Outcome) -> None:
    """What comes of one request, written down when it has ended."""
    told, untold, usage, whole = list[tuple[float, int]](), list[float](), dict[str, Any](), False
    async for line in response.aiter_lines():
        now = time.monotonic()
        if not line.startswith("data:"):
            continue
        if line[5:].strip() == "[DONE]":
            whole = True
            break
        chunk = json.loads(line[5:])
        if error := chunk.get("error"):
            raise _refusal(error, "error in a stream")
        choices = chunk.get("choices") or ()
        whole |= any(choice.get("finish_reason") for choice in choices)
        if found := chunk.get("usage"):
            usage = found
            told.append((now, int(usage.get("completion_tokens", 0))))
        elif any(choice.get("text") for choice in choices):
            untold.append(now)
    if not whole:
        raise Refused(CUT, "the stream ended without a finish_reason and without [DONE]")
    outcome.prompt_tokens = int(usage.get("prompt_tokens") or outcome.prompt_tokens)
    outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    outcome.shared_out = bool(untold)
    _write(outcome, shares(untold, usage.get("completion_tokens")) if untold else told)


def _write(outcome: Outcome, seen: Sequence[tuple[float, int]]) -> None:
    """seen: when so many tokens were there in all."""
    before = 0
    for at, total in seen:
        if total > before:
            outcome.saw(at, total - before)
            before = total


def shares(times: Sequence[float], tokens: int | None) -> list[tuple[float, int]]:
    """When so many of the tokens were there, had each chunk brought as many; None of them: one for
    each chunk.
    """
    total, chunks = len(times) if tokens is None else tokens, len(times)
    return [(at, total * number // chunks) for number, at in enumerate(times, 1)]


def refused_by(status: int, body: bytes) -> Refused:
    """From an HTTP response, by OpenAI's code where it has one."""
    try:
        return _refusal(json.loads(body)["error"], f"HTTP {status}")
    except (ValueError, LookupError, TypeError):
        return Refused(f"HTTP {status}", body.decode("utf-8", "replace")[:200])


def _refusal(error: Any, otherwise: str) -> Refused:
    if not isinstance(error, dict):
        return Refused(otherwise, str(error))
    return Refused(str(error.get("code") or otherwise), str(error.get("message", "")))


@asynccontextmanager
async def http_client(base: str, credentials: Credentials) -> AsyncIterator[httpx.AsyncClient]:
    """base: ends in /v1, or whatever stands before /completions. As many connections as there are
    requests.
    """
    unbounded = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers, verify = dict(metadata_of(credentials.token)), _ssl_context(credentials)
    async with httpx.AsyncClient(
        base_url=base,
        headers=headers,
        verify=verify,
        limits=unbounded,
        timeout=None,
        trust_env=False,
    ) as client:
        yield client


def _ssl_context(credentials: Credentials) -> ssl.SSLContext:
    """ConfigError for files that are no certificates."""
    tls = credentials.tls
    try:
        context = ssl.create_default_context(cafile=tls.ca if tls else None)
        if tls and tls.certificate:
            context.load_cert_chain(tls.certificate, tls.key)
    except OSError as error:
        raise ConfigError(f"TLS: {error}") from None
    return context


async def find_model(base: str, credentials: Credentials, wanted: str | None) -> Model:
    """The first that is offered, or the one of that name; ConfigError when nobody there offers it.

    A server that offers no list is asked for the one that is wanted all the same.
    """
    try:
        async with http_client(base, credentials) as client:
            response = await client.get("models", timeout=SECONDS)
        if wanted and response.is_error and response.status_code not in REFUSALS:
            return Model(wanted, None)
        offered = {str(model["id"]): model for model in response.raise_for_status().json()["data"]}
        name = wanted or next(iter(offered))
    except (
        httpx.HTTPError,
        httpx.InvalidURL,
        ValueError,
        LookupError,
        TypeError,
        StopIteration,
    ) as error:
        raise ConfigError(
            f"--target {base}: no list of models from there ({type(error).__name__}: {error})"
        ) from None
    if name not in offered:
        raise ConfigError(f"--served-model-name {name}: {base} offers {', '.join(offered)}")
    context = offered[name].get("max_model_len")
    return Model(name, context if isinstance(context, int) else None)
