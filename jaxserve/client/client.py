"""The client for threads: its methods return when the answer is there."""

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from jaxserve.client import requests
from jaxserve.client.base import ClientBase
from jaxserve.client.connection import Connection
from jaxserve.client.descriptions import Loads, ModelInfo, ServerInfo
from jaxserve.client.messages import ChatOptions, Messages, Options, Prompt
from jaxserve.client.requests import RpcRequest
from jaxserve.client.responses import ignored_in
from jaxserve.client.results import Embedded, Event, Result, Score, Tokenized
from jaxserve.client.retrying import ReadinessPoll
from jaxserve.sampling_params import SamplingParams


class Stream:
    """Events of one answer: PromptInfo, then Delta and PromptLogprobs, and Finish at the end.

    A stream is iterated once, with or without a `with` block. Leaving it early, by `close`, `break`
    or an exception, cancels the call, and the server frees what the request held. Another thread
    may call `close`; a thread that waits for the next event then sees the stream end.
    """

    def __init__(self, connection: Connection, request: RpcRequest[Event], timeout: float | None):
        self._connection = connection
        self._request = request
        self._attempts = connection.attempts(request, timeout)
        self._closed = threading.Event()
        self._call = connection.call(request, self._attempts)
        self._ignored: tuple[str, ...] = ()

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of what changed nothing, see Result; empty until the stream was read to its end."""
        return self._ignored

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while not self._closed.is_set():
            try:
                message = next(self._call)
            except grpc.RpcError as failure:
                self._retry(failure)
            except StopIteration:
                self._ignored = ignored_in(self._call.trailing_metadata())
                raise
            else:
                self._attempts.end()
                return self._request.parse(message)
        self._call.cancel()  # close() may have missed an attempt that began meanwhile
        raise StopIteration

    def _retry(self, failure: grpc.RpcError) -> None:
        if self._closed.is_set():
            return
        was_closed = self._closed.wait(self._attempts.next_delay(failure))
        if not was_closed:
            self._call = self._connection.call(self._request, self._attempts)

    def close(self) -> None:
        """Cancel the call unless it has ended."""
        self._closed.set()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client(ClientBase[Stream]):
    """Client of one jaxserve server, over one connection. Threads may share it.

    Every method raises RequestError for a request that is wrong by itself, before anything is sent;
    the error of jaxserve.errors with which the server refused; and CallError for a call that failed
    without an answer of the server. `code` is gRPC's in all of them.

    Args:
        address: HOST:PORT of the server's gRPC.
        token: Sent with every call.
        tls: Certificates; None sends everything in plain text.
        timeout: Seconds that a call may take with all its retries, unless the call says otherwise.
            None is any time.
        retries: How often a call is made again that ended before anything came of it: with
            UNAVAILABLE, with RESOURCE_EXHAUSTED and a time to come back, or since the server
            had begun to stop before the call arrived.

    Raises:
        ConfigError: The token, a file of tls or retries is wrong.
    """

    _library = grpc
    _new_stream = Stream

    # ---- text

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Result:
        """Generate text and return all choices when they are done.

        Args:
            prompt: Text, or token ids.
            params: How tokens are chosen.
            **options: Single fields of SamplingParams, which override those of params; and timeout
                in seconds, request_id, priority and cache_salt.
        """
        return self._call(requests.generate(prompt, params, options), options.get("timeout"))

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Result:
        """Answer a conversation, which the checkpoint's chat template makes a prompt of.

        Args:
            messages: Objects with role and content, as in OpenAI's API.
            params: How tokens are chosen.
            **options: The options of `generate`; tools, tool_choice, tool_name and
                parallel_tool_calls; and reasoning_effort, enable_thinking, thinking_budget,
                verbosity and chat_template_kwargs, see ChatOptions.
        """
        return self._call(requests.chat(messages, params, options), options.get("timeout"))

    def score(
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
        return self._call(request, timeout)

    def embed(
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
        return self._call(request, timeout)

    def tokenize(self, text: str | Messages, *, timeout: float | None = None) -> Tokenized:
        """Return the token ids of a text or of a conversation."""
        return self._call(requests.tokenize(text), timeout)

    def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        """Return the text of token ids, without special tokens."""
        return self._call(requests.detokenize(token_ids), timeout)

    # ---- for operators

    def abort(self, request_ids: Sequence[str], *, timeout: float | None = None) -> tuple[str, ...]:
        """End requests and return the ids of those that were in flight."""
        return self._call(requests.abort(request_ids), timeout)

    def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """Return facts about the model that is served."""
        return self._call(requests.model_info(), timeout)

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Return facts about the server and its engine."""
        return self._call(requests.server_info(), timeout)

    def loads(self, *, timeout: float | None = None) -> Loads:
        """Return what runs and waits on the server now."""
        return self._call(requests.loads(), timeout)

    def flush_cache(self, *, timeout: float | None = None) -> None:
        """Forget every cached page that no request holds."""
        self._call(requests.flush_cache(), timeout)

    def drain(self, *, timeout: float | None = None) -> int:
        """End the server when all that runs is done, and return how many requests that are."""
        return self._call(requests.drain(), timeout)

    # ---- the connection

    def wait_ready(self, timeout: float) -> None:
        """Wait until the server takes requests.

        Args:
            timeout: Seconds.

        Raises:
            CallError: The time has passed (its code is DEADLINE_EXCEEDED).
        """
        poll = ReadinessPoll(self._connection.address, timeout)
        pause: float | None = 0.0
        while pause is not None:
            time.sleep(pause)
            try:
                pause = poll.after_answer(self._connection.check(poll.timeout))
            except grpc.RpcError as failure:
                pause = poll.after_failure(failure)

    def close(self) -> None:
        """Close the connection; calls that are still open fail with CANCELLED."""
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

    def _call[T](self, request: RpcRequest[T], timeout: float | None) -> T:
        attempts = self._connection.attempts(request, timeout)
        while True:
            try:
                answer, call = self._connection.wait(request, attempts)
                return request.result(answer, call.trailing_metadata())
            except grpc.RpcError as failure:
                time.sleep(attempts.next_delay(failure))
