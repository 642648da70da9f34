"""Caller over OpenAI's HTTP API: POST completions with token ids or a text, streamed.

Servers are asked to report with every chunk how many tokens there are so far
(continuous_usage_stats: jaxserve, vLLM and SGLang do). For a server that does not, the tokens that
it reports at the end, or else one for each chunk, are shared out evenly over the chunks, and the
outcome says so. A chunk comes when there is text: a token without text counts with the next chunk.
"""

import json
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from jaxserve.bench.caller import CUT, Credentials, Refused
from jaxserve.bench.latency import Outcome
from jaxserve.client.channel import metadata_of
from jaxserve.errors import ConfigError
from jaxserve.flag_errors import flag_error

MALFORMED = "MALFORMED"  # status of an answer that is not as OpenAI's API says
SECONDS = 30.0  # for a server to list its models
REFUSALS = (401, 403)  # statuses of refused credentials
# Errors of asking a server that lists no models.
NO_LIST = (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError, StopIteration)


@dataclass(frozen=True)
class Model:
    """A model that a server offers."""

    name: str
    # In tokens; None if the server does not report it, for which OpenAI's API has no field.
    max_context: int | None


class OpenAICaller:
    """Caller of one model; a strict one sends only what OpenAI's own API knows."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        model: str,
        ignore_eos: bool,
        strict: bool,
        choices: int = 1,
    ):
        self._choices = choices
        self._client = client
        self._model = model
        self._ignore_eos = ignore_eos
        self._strict = strict

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
        if self._choices > 1:
            body["n"] = self._choices
        if not self._strict:
            usage["continuous_usage_stats"] = True
            body |= {"ignore_eos": self._ignore_eos, "cache_salt": salt}
        return json.dumps(body).encode()

    async def ask(self, request: bytes, outcome: Outcome) -> None:
        headers = {"content-type": "application/json"}
        if outcome.deadline is not None:
            headers["x-request-timeout"] = f"{outcome.deadline:g}"
        try:
            async with self._client.stream(
                "POST", "completions", content=request, headers=headers
            ) as response:
                if response.status_code != 200:
                    refused = refused_by(response.status_code, await response.aread())
                    refused.retry_after = _retry_after(response.headers)
                    raise refused
                await _read(response, outcome)
        except httpx.HTTPError as error:
            raise Refused(type(error).__name__, str(error)) from None
        except (ValueError, TypeError, AttributeError) as error:
            raise Refused(MALFORMED, f"a chunk is not as OpenAI's API says: {error}") from None


async def _read(response: httpx.Response, outcome: Outcome) -> None:
    """Read the chunks of an answer, and note in the outcome what has come, however it ends."""
    chunks = _Chunks()
    try:
        await chunks.read(response)
    finally:
        usage = chunks.usage
        outcome.prompt_tokens = int(usage.get("prompt_tokens") or outcome.prompt_tokens)
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        outcome.shared_out = bool(chunks.unreported)
        reported = chunks.reported
        if chunks.unreported:
            reported = shares(chunks.unreported, usage.get("completion_tokens"))
        _write(outcome, reported)


class _Chunks:
    """The chunks of a streamed answer that have come."""

    def __init__(self) -> None:
        self.reported: list[tuple[float, int]] = []  # clock reading, and tokens so far
        self.unreported: list[float] = []  # clock readings of chunks with text alone
        self.usage: dict[str, Any] = {}

    async def read(self, response: httpx.Response) -> None:
        """Read all chunks; Refused if an error is among them, or the end is missing."""
        whole = False
        async for line in response.aiter_lines():
            now = time.monotonic()
            if not line.startswith("data:"):
                continue
            if line[5:].strip() == "[DONE]":
                return
            whole |= self._take(json.loads(line[5:]), now)
        if not whole:
            raise Refused(CUT, "the stream ended without a finish_reason and without [DONE]")

    def _take(self, chunk: dict[str, Any], now: float) -> bool:
        """Take in a chunk; return whether a choice ends with it."""
        if chunk.get("error"):
            raise _refusal(chunk["error"], "error in a stream")
        choices = chunk.get("choices") or ()
        if chunk.get("usage"):
            self.usage = chunk["usage"]
            self.reported.append((now, int(self.usage.get("completion_tokens", 0))))
        elif any(choice.get("text") for choice in choices):
            self.unreported.append(now)
        return any(choice.get("finish_reason") for choice in choices)


def _write(outcome: Outcome, seen: Sequence[tuple[float, int]]) -> None:
    """Note messages in an outcome; seen has clock readings, and the tokens so far."""
    before = 0
    for at, total in seen:
        if total > before:
            outcome.saw(at, total - before)
            before = total


def shares(times: Sequence[float], tokens: int | None) -> list[tuple[float, int]]:
    """Share tokens out evenly over chunks.

    Args:
        tokens: Number of tokens; None counts one token for each chunk.

    Returns:
        Clock readings, and the tokens so far.
    """
    total = len(times) if tokens is None else tokens
    return [(at, total * number // len(times)) for number, at in enumerate(times, 1)]


def refused_by(status: int, body: bytes) -> Refused:
    """Return the error of an HTTP response, with OpenAI's code if it has one."""
    try:
        return _refusal(json.loads(body)["error"], f"HTTP {status}")
    except (ValueError, LookupError, TypeError):
        return Refused(f"HTTP {status}", body.decode("utf-8", "replace")[:200])


def _retry_after(headers: httpx.Headers) -> float | None:
    """Return the seconds after which the server wants to be asked again; None if it does not."""
    for name, unit in (("retry-after-ms", 1000), ("retry-after", 1)):
        if headers.get(name, "").isdecimal():
            return int(headers[name]) / unit
    return None


def _refusal(error: Any, otherwise: str) -> Refused:
    if not isinstance(error, dict):
        return Refused(otherwise, str(error))
    return Refused(str(error.get("code") or otherwise), str(error.get("message", "")))


def http_client(base: str, credentials: Credentials) -> httpx.AsyncClient:
    """Return a client with as many connections as there are requests.

    Args:
        base: URL before /completions, which usually ends in /v1.
    """
    unbounded = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(
        base_url=base,
        headers=dict(metadata_of(credentials.token)),
        verify=_ssl_context(credentials),
        limits=unbounded,
        timeout=None,
        trust_env=False,
    )


def _ssl_context(credentials: Credentials) -> ssl.SSLContext:
    """Return the TLS settings; ConfigError for files that are no certificates."""
    tls = credentials.tls
    try:
        context = ssl.create_default_context(cafile=tls.ca if tls else None)
        if tls and tls.certificate:
            context.load_cert_chain(tls.certificate, tls.key)
    except OSError as error:
        raise ConfigError(f"TLS: {error}") from None
    return context


async def find_model(base: str, credentials: Credentials, wanted: str | None) -> Model:
    """Return the first model that the server offers, or the one that is wanted.

    A server without a list of models is asked for the wanted one all the same. Raises ConfigError
    if the server does not offer it.
    """
    try:
        async with http_client(base, credentials) as client:
            response = await client.get("models", timeout=SECONDS)
        if wanted and response.is_error and response.status_code not in REFUSALS:
            return Model(wanted, None)
        offered = {str(model["id"]): model for model in response.raise_for_status().json()["data"]}
        name = wanted or next(iter(offered))
    except NO_LIST as error:
        problem = f"no list of models comes from there ({type(error).__name__}: {error})"
        raise flag_error("--target", base, problem) from None
    if name not in offered:
        raise flag_error("--served-model-name", name, f"{base} offers {', '.join(offered)}")
    context = offered[name].get("max_model_len")
    return Model(name, context if isinstance(context, int) else None)
