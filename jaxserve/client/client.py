"""The client that waits."""

import time
from collections.abc import Sequence
from threading import Event as Flag
from types import TracebackType
from typing import Self, Unpack

import grpc

from jaxserve.client import requests as asking
from jaxserve.client.channel import TLS
from jaxserve.client.connection import ADDRESS, RETRIES, Connection
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


class Stream:
    """Events of one answer: PromptInfo, then Delta and PromptLogprobs, Finish last.

    Iterate once, in a `with` or not: leaving early, by close, break or an exception, cancels the
    call, and the server frees what it held. close may be called from another thread; a waiting
    reader then sees the stream end.
    """

    def __init__(self, connection: Connection, ask: Ask[Event], timeout: float | None):
        self._connection, self._ask = connection, ask
        self._attempts = connection.attempts(ask, timeout)
        self._closed = Flag()
        self._call = connection.call(ask, self._attempts)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while not self._closed.is_set():
            try:
                message = next(self._call)
            except grpc.RpcError as failure:
                self._retry(failure)
            else:
                self._attempts.end()
                return self._ask.read(message)
        self._call.cancel()  # a new attempt may have begun meanwhile
        raise StopIteration

    def _retry(self, failure: grpc.RpcError) -> None:
        if not self._closed.is_set() and not self._closed.wait(self._attempts.wait(failure)):
            self._call = self._connection.call(self._ask, self._attempts)

    def close(self) -> None:
        self._closed.set()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client:
    """Of a server of jaxserve.v1, over one connection; any number of threads may use it.

    token: sent with every call. tls: None sends everything in the clear. timeout: seconds that a
    call may take with all its retries, unless the call says otherwise; None: any. retries: how
    often a call is made again that was refused before anything came of it, with UNAVAILABLE, or
    with RESOURCE_EXHAUSTED and a time to come back.

    A request that is wrong by itself is RequestError before it is sent. What the server refuses is
    the error of jaxserve.errors that it refused with; CallError is what failed without its word.
    `code` is gRPC's in both.
    """

    def __init__(
        self,
        address: str = ADDRESS,
        *,
        token: str | None = None,
        tls: TLS | None = None,
        timeout: float | None = None,
        retries: int = RETRIES,
    ):
        self._connection = Connection(grpc, address, token, tls, timeout, retries)

    # ---- text

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Result:
        """All choices of a prompt, when they are done."""
        return self._ask(asking.generate(prompt, params, options), options.get("timeout"))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Stream:
        """The same while it grows. The request is sent now, not with the first event."""
        return Stream(
            self._connection, asking.stream(prompt, params, options), options.get("timeout")
        )

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Result:
        """The answer to a conversation, which the checkpoint's chat template makes a prompt of."""
        return self._ask(asking.chat(messages, params, options), options.get("timeout"))

    def chat_stream(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Stream:
        """The same while it grows."""
        return Stream(
            self._connection, asking.chat_stream(messages, params, options), options.get("timeout")
        )

    def score(
        self,
        prompt: Prompt,
        *,
        top_logprobs: int = 0,
        request_id: str = "",
        priority: int = 0,
        timeout: float | None = None,
    ) -> Score:
        """Log-probabilities of a given text."""
        return self._ask(asking.score(prompt, top_logprobs, request_id, priority), timeout)

    def embed(
        self,
        inputs: Sequence[Prompt],
        *,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> Embedded:
        """Vectors of texts, from a model that embeds."""
        return self._ask(asking.embed(inputs, request_id, priority, cache_salt), timeout)

    def tokenize(self, text: str | Messages, *, timeout: float | None = None) -> Tokenized:
        """Token ids of a text, or of a conversation."""
        return self._ask(asking.tokenize(text), timeout)

    def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        """Their text, without special tokens."""
        return self._ask(asking.detokenize(token_ids), timeout)

    # ---- for operators

    def abort(self, request_ids: Sequence[str], *, timeout: float | None = None) -> tuple[str, ...]:
        """End requests; those of them that were in flight."""
        return self._ask(asking.abort(request_ids), timeout)

    def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        return self._ask(asking.model_info(), timeout)

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        return self._ask(asking.server_info(), timeout)

    def loads(self, *, timeout: float | None = None) -> Loads:
        return self._ask(asking.loads(), timeout)

    def flush_cache(self, *, timeout: float | None = None) -> None:
        """Forget every cached page that no request holds."""
        self._ask(asking.flush_cache(), timeout)

    def drain(self, *, timeout: float | None = None) -> int:
        """Let the server end when what runs is done; how many requests that are."""
        return self._ask(asking.drain(), timeout)

    # ---- the connection

    def wait_ready(self, timeout: float) -> None:
        """Until the server takes requests; CallError with DEADLINE_EXCEEDED after so many
        seconds."""
        readiness = Readiness(self._connection.address, timeout)
        pause: float | None = 0.0
        while pause is not None:
            time.sleep(pause)
            try:
                pause = readiness.heard(self._connection.check(readiness.timeout))
            except grpc.RpcError as failure:
                pause = readiness.failed(failure)

    def close(self) -> None:
        """Calls that are still open fail with CANCELLED."""
        self._connection.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask[T](self, ask: Ask[T], timeout: float | None) -> T:
        attempts = self._connection.attempts(ask, timeout)
        while True:
            try:
                return ask.read(self._connection.call(ask, attempts))
            except grpc.RpcError as failure:
                time.sleep(attempts.wait(failure))
