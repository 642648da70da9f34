"""The client for an event loop: its methods are coroutines."""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc import aio  # type: ignore[attr-defined]

from jaxserve.client import requests
from jaxserve.client.base import ClientBase
from jaxserve.client.connection import Connection
from jaxserve.client.descriptions import Loads, ModelInfo, ServerInfo
from jaxserve.client.errors import CallError
from jaxserve.client.messages import ChatOptions, Messages, Options, Prompt
from jaxserve.client.requests import RpcRequest
from jaxserve.client.responses import ignored_in
from jaxserve.client.results import Embedded, Event, Result, Score, Tokenized
from jaxserve.client.retrying import ReadinessPoll
from jaxserve.sampling_params import SamplingParams


class AsyncStream:
    """Events of one answer: PromptInfo, then Delta and PromptLogprobs, and Finish at the end.

    A stream is iterated once, with or without an `async with` block. Leaving it early, by `close`,
    `break`, an exception or cancellation, cancels the call, and the server frees what the request
    held.
    """

    _call: Any = None  # for __del__, where __init__ fails

    def __init__(self, connection: Connection, request: RpcRequest[Event], timeout: float | None):
        self._connection = connection
        self._request = request
        self._attempts = connection.attempts(request, timeout)
        self._closed = asyncio.Event()
        self._call = connection.call(request, self._attempts)
        self._ignored: tuple[str, ...] = ()

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of what changed nothing, see Result; empty until the stream was read to its end."""
        return self._ignored

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._closed.is_set():
            try:
                message = await _answer_of(self._call.read())
            except grpc.RpcError as failure:
                await self._retry(failure)
            except CallError:
                if not self._closed.is_set():
                    raise
            else:
                self._attempts.end()
                if message is aio.EOF:
                    self._ignored = ignored_in(await self._call.trailing_metadata())
                    break
                return self._request.parse(message)
        self._call.cancel()  # close() may have missed an attempt that began meanwhile
        raise StopAsyncIteration

    async def _retry(self, failure: grpc.RpcError) -> None:
        delay = self._attempts.next_delay(failure)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), delay)
        if not self._closed.is_set():
            self._call = self._connection.call(self._request, self._attempts)

    async def close(self) -> None:
        """Cancel the call unless it has ended."""
        self._closed.set()
        self._call.cancel()

    def __del__(self) -> None:
        # grpc.aio keeps a call alive until it has ended, even if the stream was dropped.
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncClient(ClientBase[AsyncStream]):
    """Client of one jaxserve server for an event loop, inside of which it is made.

    The methods, their arguments and errors are those of Client.

    Args:
        address: HOST:PORT of the server's gRPC.
        token: Sent with every call.
        tls: Certificates; None sends everything in plain text.
        timeout: Seconds that a call may take with all its retries, unless the call says otherwise.
            None is any time.
        retries: How often a call is made again that ended before anything came of it.

    Raises:
        ConfigError: The token, a file of tls or retries is wrong.
    """

    _library = aio
    _new_stream = AsyncStream

    # ---- text

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Result:
        """Generate text and return all choices when they are done; see Client.generate."""
        request = requests.generate(prompt, params, options)
        return await self._call(request, options.get("timeout"))

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Result:
        """Answer a conversation, which the chat template makes a prompt of; see Client.chat."""
        request = requests.chat(messages, params, options)
        return await self._call(request, options.get("timeout"))

    async def score(
        self,
        prompt: Prompt,
        *,
        top_logprobs: int = 0,
        request_id: str = "",
        priority: int = 0,
        timeout: float | None = None,
    ) -> Score:
        """Return the log-probabilities of a given text, with top_logprobs alternatives each."""
        request = requests.score(prompt, top_logprobs, request_id, priority)
        return await self._call(request, timeout)

    async def embed(
        self,
        inputs: Sequence[Prompt],
        *,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> Embedded:
        """Return the embeddings of texts, from a model that embeds."""
        request = requests.embed(inputs, request_id, priority, cache_salt)
        return await self._call(request, timeout)

    async def tokenize(self, text: str | Messages, *, timeout: float | None = None) -> Tokenized:
        """Return the token ids of a text or of a conversation."""
        return await self._call(requests.tokenize(text), timeout)

    async def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        """Return the text of token ids, without special tokens."""
        return await self._call(requests.detokenize(token_ids), timeout)

    # ---- for operators

    async def abort(
        self, request_ids: Sequence[str], *, timeout: float | None = None
    ) -> tuple[str, ...]:
        """End requests and return the ids of those that were in flight."""
        return await self._call(requests.abort(request_ids), timeout)

    async def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """Return facts about the model that is served."""
        return await self._call(requests.model_info(), timeout)

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Return facts about the server and its engine."""
        return await self._call(requests.server_info(), timeout)

    async def loads(self, *, timeout: float | None = None) -> Loads:
        """Return what runs and waits on the server now."""
        return await self._call(requests.loads(), timeout)

    async def flush_cache(self, *, timeout: float | None = None) -> None:
        """Forget every cached page that no request holds."""
        await self._call(requests.flush_cache(), timeout)

    async def drain(self, *, timeout: float | None = None) -> int:
        """End the server when all that runs is done, and return how many requests that are."""
        return await self._call(requests.drain(), timeout)

    # ---- the connection

    async def wait_ready(self, timeout: float) -> None:
        """Wait until the server takes requests.

        Args:
            timeout: Seconds.

        Raises:
            CallError: The time has passed (its code is DEADLINE_EXCEEDED).
        """
        poll = ReadinessPoll(self._connection.address, timeout)
        pause: float | None = 0.0
        while pause is not None:
            await asyncio.sleep(pause)
            try:
                pause = poll.after_answer(await _answer_of(self._connection.check(poll.timeout)))
            except grpc.RpcError as failure:
                pause = poll.after_failure(failure)

    async def close(self) -> None:
        """Close the connection; calls that are still open fail with CANCELLED."""
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

    async def _call[T](self, request: RpcRequest[T], timeout: float | None) -> T:
        attempts = self._connection.attempts(request, timeout)
        while True:
            try:
                call = self._connection.call(request, attempts)
                answer = await _answer_of(call)
                return request.result(answer, await call.trailing_metadata())
            except grpc.RpcError as failure:
                await asyncio.sleep(attempts.next_delay(failure))


async def _answer_of[T](call: Awaitable[T]) -> T:
    """Wait for a call's answer.

    grpc.aio raises CancelledError where the call was cancelled as well. Only the cancellation of
    the task that waits stays one; that of the call becomes CallError.
    """
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CallError("CANCELLED", "the call, or the client, was closed while it ran") from None
