"""The client of an event loop."""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc import aio  # type: ignore[attr-defined]

from jaxserve.client import requests as asking
from jaxserve.client.channel import TLS
from jaxserve.client.connection import ADDRESS, RETRIES, Connection
from jaxserve.client.errors import CallError
from jaxserve.client.requests import Ask, ChatOptions, Messages, Options, Prompt
from jaxserve.client.results import (
    Embedded,
    Event,
    Loads,
    ModelInfo,
    Result,
    Score,
    ServerInfo,
    Tokenized,
)
from jaxserve.client.retrying import Readiness
from jaxserve.request import SamplingParams


class AsyncStream:
    """Events of one answer: PromptInfo, then Delta and PromptLogprobs, Finish last.

    Iterate once, in an `async with` or not: leaving early, by close, break, an exception or
    cancellation, cancels the call, and the server frees what it held.
    """

    _call: Any = None  # until there is one

    def __init__(self, connection: Connection, ask: Ask[Event], timeout: float | None):
        self._connection, self._ask = connection, ask
        self._attempts = connection.attempts(ask, timeout)
        self._closed = asyncio.Event()
        self._call = connection.call(ask, self._attempts)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._closed.is_set():
            try:
                message = await _answered(self._call.read())
            except grpc.RpcError as failure:
                await self._retry(failure)
            except CallError:
                if not self._closed.is_set():
                    raise
            else:
                self._attempts.end()
                if message is aio.EOF:
                    break
                return self._ask.read(message)
        self._call.cancel()  # a new attempt may have begun meanwhile
        raise StopAsyncIteration

    async def _retry(self, failure: grpc.RpcError) -> None:
        delay = self._attempts.wait(failure)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), delay)
        if not self._closed.is_set():
            self._call = self._connection.call(self._ask, self._attempts)

    async def close(self) -> None:
        self._closed.set()
        self._call.cancel()

    def __del__(self) -> None:
        if (
            self._call is not None
        ):  # grpc.aio keeps it alive until it is done, whether anybody reads it or not
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncClient:
    """Client for an event loop, of which it is to be made: the same methods, arguments and
    errors."""

    def __init__(
        self,
        address: str = ADDRESS,
        *,
        token: str | None = None,
        tls: TLS | None = None,
        timeout: float | None = None,
        retries: int = RETRIES,
    ):
        self._connection = Connection(aio, address, token, tls, timeout, retries)

    # ---- text

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Result:
        """All choices of a prompt, when they are done."""
        return await self._ask(asking.generate(prompt, params, options), options.get("timeout"))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """The same while it grows. The request is sent now, not with the first event."""
        return AsyncStream(
            self._connection, asking.stream(prompt, params, options), options.get("timeout")
        )

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Result:
        """The answer to a conversation, which the checkpoint's chat template makes a prompt of."""
        return await self._ask(asking.chat(messages, params, options), options.get("timeout"))

    def chat_stream(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncStream:
        """The same while it grows."""
        return AsyncStream(
            self._connection, asking.chat_stream(messages, params, options), options.get("timeout")
        )

    async def score(
        self,
        prompt: Prompt,
        *,
        top_logprobs: int = 0,
        request_id: str = "",
        priority: int = 0,
        timeout: float | None = None,
    ) -> Score:
        """Log-probabilities of a given text."""
        return await self._ask(asking.score(prompt, top_logprobs, request_id, priority), timeout)

    async def embed(
        self,
        inputs: Sequence[Prompt],
        *,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> Embedded:
        """Vectors of texts, from a model that embeds."""
        return await self._ask(asking.embed(inputs, request_id, priority, cache_salt), timeout)

    async def tokenize(self, text: str | Messages, *, timeout: float | None = None) -> Tokenized:
        """Token ids of a text, or of a conversation."""
        return await self._ask(asking.tokenize(text), timeout)

    async def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        """Their text, without special tokens."""
        return await self._ask(asking.detokenize(token_ids), timeout)

    # ---- for operators

    async def abort(
        self, request_ids: Sequence[str], *, timeout: float | None = None
    ) -> tuple[str, ...]:
        """End requests; those of them that were in flight."""
        return await self._ask(asking.abort(request_ids), timeout)

    async def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        return await self._ask(asking.model_info(), timeout)

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        return await self._ask(asking.server_info(), timeout)

    async def loads(self, *, timeout: float | None = None) -> Loads:
        return await self._ask(asking.loads(), timeout)

    async def flush_cache(self, *, timeout: float | None = None) -> None:
        """Forget every cached page that no request holds."""
        await self._ask(asking.flush_cache(), timeout)

    async def drain(self, *, timeout: float | None = None) -> int:
        """Let the server end when what runs is done; how many requests that are."""
        return await self._ask(asking.drain(), timeout)

    # ---- the connection

    async def wait_ready(self, timeout: float) -> None:
        """Until the server takes requests; CallError with DEADLINE_EXCEEDED after so many
        seconds."""
        readiness = Readiness(self._connection.address, timeout)
        pause: float | None = 0.0
        while pause is not None:
            await asyncio.sleep(pause)
            try:
                pause = readiness.heard(await _answered(self._connection.check(readiness.timeout)))
            except grpc.RpcError as failure:
                pause = readiness.failed(failure)

    async def close(self) -> None:
        """Calls that are still open fail with CANCELLED."""
        await self._connection.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _ask[T](self, ask: Ask[T], timeout: float | None) -> T:
        attempts = self._connection.attempts(ask, timeout)
        while True:
            try:
                return ask.read(await _answered(self._connection.call(ask, attempts)))
            except grpc.RpcError as failure:
                await asyncio.sleep(attempts.wait(failure))


async def _answered[T](call: Awaitable[T]) -> T:
    """Its answer. Where the call was cancelled, and not the task that waits for it, that is
    CallError.
    """
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CallError("CANCELLED", "the call, or the client, was closed while it ran") from None
