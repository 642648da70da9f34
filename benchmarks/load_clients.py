"""One request over gRPC, or over HTTP as OpenAI has it, with a reading of the clock for each message.

As little as can be is done for a message: what is done for one request delays the readings of all others.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import cycle
from typing import Any, NamedTuple, Protocol

import httpx
from grpc import aio  # type: ignore[attr-defined]

from benchmarks.latency import OK, Outcome
from jaxserve.client.channel import TLS, metadata_of
from jaxserve.errors import ConfigError
from jaxserve.v1 import common_pb2, inference_pb2, inference_pb2_grpc

CALLS_PER_CONNECTION = 1000  # a server's default bound is 1024: more would wait in the client, unseen
CONNECT_SECONDS = 10
CUT, SHORT = "CUT", "SHORT"  # a stream without its end; an answer with another number of tokens than asked for


class Refused(Exception):
    """A request ended with something else than its tokens. status: a word to count it by."""

    def __init__(self, status: str, text: str):
        super().__init__(" ".join(text.split()))
        self.status = status


class Credentials(NamedTuple):
    """tls None: in plain text."""

    token: str | None = None
    tls: TLS | None = None


class Caller(Protocol):
    def prepare(self, prompt: Sequence[int], output_tokens: int, salt: str) -> Any:
        """A request, made before its time. salt: cached pages are shared only among requests with the same."""
        ...

    async def ask(self, request: Any, outcome: Outcome) -> None:
        """Send it, and write down what comes; Refused when that is not what was asked for."""
        ...


async def call(caller: Caller, request: Any, outcome: Outcome) -> None:
    """The whole of one request. Cancelled, it stays UNFINISHED."""
    outcome.sent = time.monotonic()
    try:
        await caller.ask(request, outcome)
        if outcome.received != outcome.output_tokens:
            raise Refused(SHORT, f"{outcome.received} tokens came instead of {outcome.output_tokens}")
    except Refused as error:
        outcome.status, outcome.error = error.status, str(error)
    else:
        outcome.status = OK
    outcome.ended = time.monotonic()


class GrpcCaller:
    def __init__(self, channels: Sequence[aio.Channel], token: str | None):
        self._metadata = metadata_of(token)
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        self._streams = cycle([stub.GenerateStream for stub in stubs])

    def prepare(self, prompt: Sequence[int], output_tokens: int, salt: str) -> inference_pb2.GenerateStreamRequest:
        return inference_pb2.GenerateStreamRequest(
            token_ids=common_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_tokens),
            cache_salt=salt,
        )

    async def ask(self, request: inference_pb2.GenerateStreamRequest, outcome: Outcome) -> None:
        answer = next(self._streams)(request, metadata=self._metadata)
        message = None
        try:
            async for message in answer:
                if count := len(message.delta.token_ids):
                    outcome.saw(time.monotonic(), count)
        except aio.AioRpcError as error:
            raise Refused(error.code().name, error.details() or "") from None
        finally:
            answer.cancel()
        if message is None or not message.HasField("finish_info"):
            raise Refused(CUT, "the stream ended without FinishInfo")
        outcome.cached_tokens = message.finish_info.usage.cached_prompt_tokens


@asynccontextmanager
async def grpc_caller(address: str, requests: int, credentials: Credentials) -> AsyncIterator[GrpcCaller]:
    """With connections for so many requests at once, all of them made; ConfigError when that takes too long."""
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))  # channels would share a connection
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(_channel(address, options, credentials.tls))
            for _ in range(1 + requests // CALLS_PER_CONNECTION)
        ]
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await asyncio.gather(*(channel.channel_ready() for channel in channels))
        except TimeoutError:
            raise ConfigError(f"--address {address}: {len(channels)} connections could not be made") from None
        yield GrpcCaller(channels, credentials.token)


def _channel(address: str, options: Sequence[tuple[str, int]], tls: TLS | None) -> aio.Channel:
    if tls is None:
        return aio.insecure_channel(address, options=options)
    return aio.secure_channel(address, tls.credentials(), options=options)


class OpenAICaller:
    """POST /v1/completions with token ids. Of every chunk the server has to say how many tokens there are so far:
    jaxserve, vLLM and SGLang do when asked for continuous_usage_stats.

    A chunk comes when there is text. Tokens that spell none yet are counted with the next one that does.
    """

    def __init__(self, client: httpx.AsyncClient, model: str):
        self._client, self._model = client, model

    def prepare(self, prompt: Sequence[int], output_tokens: int, salt: str) -> bytes:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "cache_salt": salt,
        }
        return json.dumps(body).encode()

    async def ask(self, request: bytes, outcome: Outcome) -> None:
        headers = {"content-type": "application/json"}
        try:
            async with self._client.stream("POST", "/v1/completions", content=request, headers=headers) as response:
                if response.status_code != 200:
                    raise refused_by(response.status_code, await response.aread())
                await self._read(response, outcome)
        except httpx.HTTPError as error:
            raise Refused(type(error).__name__, str(error)) from None

    async def _read(self, response: httpx.Response, outcome: Outcome) -> None:
        seen = 0
        async for line in response.aiter_lines():
            now = time.monotonic()
            if line == "data: [DONE]":
                return
            if line.startswith("data:"):
                usage = _usage(json.loads(line[5:]))
                if (made := usage["completion_tokens"]) > seen:
                    outcome.saw(now, made - seen)
                    seen = made
                outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        raise Refused(CUT, "the stream ended without [DONE]")


def _usage(chunk: dict[str, Any]) -> dict[str, Any]:
    if "error" in chunk:
        raise _refusal(chunk["error"], "error in a stream")
    if not chunk.get("usage"):
        raise Refused("NO_USAGE", "a chunk came without usage: the server does not know continuous_usage_stats")
    return chunk["usage"]


def refused_by(status: int, body: bytes) -> Refused:
    """From an HTTP response, by OpenAI's code where it has one."""
    try:
        return _refusal(json.loads(body)["error"], f"HTTP {status}")
    except (ValueError, KeyError, TypeError):
        return Refused(f"HTTP {status}", body.decode("utf-8", "replace")[:200])


def _refusal(error: dict[str, Any], otherwise: str) -> Refused:
    return Refused(str(error.get("code") or otherwise), str(error.get("message", "")))


@asynccontextmanager
async def openai_caller(url: str, credentials: Credentials) -> AsyncIterator[OpenAICaller]:
    """ConfigError when nobody there says which model is served."""
    unbounded = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers, verify = dict(metadata_of(credentials.token)), _ssl_context(credentials.tls)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, verify=verify, limits=unbounded, timeout=None, trust_env=False
    ) as client:
        yield OpenAICaller(client, await _model(client, url))


def _ssl_context(tls: TLS | None) -> ssl.SSLContext:
    """ConfigError for files that are no certificates."""
    try:
        context = ssl.create_default_context(cafile=tls.ca if tls else None)
        if tls and tls.certificate:
            context.load_cert_chain(tls.certificate, tls.key)
    except OSError as error:
        raise ConfigError(f"TLS: {error}") from None
    return context


async def _model(client: httpx.AsyncClient, url: str) -> str:
    try:
        response = await client.get("/v1/models", timeout=30)
        return response.raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
        raise ConfigError(f"--url {url}: no list of models from there ({type(error).__name__}: {error})") from None
