"""Base of Client and AsyncClient: the connection, and how a stream begins."""

from collections.abc import Callable
from types import ModuleType
from typing import Unpack

from jaxserve.client import requests
from jaxserve.client.channel import TLS
from jaxserve.client.connection import ADDRESS, RETRIES, Connection
from jaxserve.client.messages import ChatOptions, Messages, Options, Prompt
from jaxserve.client.requests import RpcRequest
from jaxserve.client.results import Event
from jaxserve.sampling_params import SamplingParams


class ClientBase[S]:
    """Base of both clients; S is the class of their streams."""

    _library: ModuleType  # grpc or grpc.aio
    _new_stream: Callable[[Connection, RpcRequest[Event], float | None], S]

    def __init__(
        self,
        address: str = ADDRESS,
        *,
        token: str | None = None,
        tls: TLS | None = None,
        timeout: float | None = None,
        retries: int = RETRIES,
    ):
        self._connection = Connection(self._library, address, token, tls, timeout, retries)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> S:
        """Generate text and return the events of the answer as they arrive.

        The request is sent now, not when the first event is read.

        Args:
            prompt: Text, or token ids.
            params: How tokens are chosen.
            **options: Single fields of SamplingParams, which override those of params; and timeout
                in seconds, request_id, priority and cache_salt.

        Raises:
            RequestError: An argument is wrong.
        """
        request = requests.stream(prompt, params, options)
        return self._new_stream(self._connection, request, options.get("timeout"))

    def chat_stream(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> S:
        """Answer a conversation and return the events of the answer as they arrive.

        The request is sent now, not when the first event is read.

        Args:
            messages: Objects with role and content, as in OpenAI's API.
            params: How tokens are chosen.
            **options: The options of `stream`; tools, tool_choice, tool_name and
                parallel_tool_calls; and reasoning_effort, enable_thinking, thinking_budget,
                verbosity and chat_template_kwargs, see ChatOptions.

        Raises:
            RequestError: An argument is wrong.
        """
        request = requests.chat_stream(messages, params, options)
        return self._new_stream(self._connection, request, options.get("timeout"))
