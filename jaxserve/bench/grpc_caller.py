"""Caller over gRPC, in jaxserve.v1."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import cycle

from grpc import aio  # type: ignore[attr-defined]

from jaxserve.bench.caller import CUT, Credentials, Refused
from jaxserve.bench.latency import Outcome
from jaxserve.client.channel import TLS, metadata_of
from jaxserve.flag_errors import flag_error
from jaxserve.v1 import common_pb2, inference_pb2_grpc
from jaxserve.v1.inference_pb2 import GenerateStreamRequest

# A server's default bound is 1024; more calls would wait in the client, where they are not seen.
CALLS_PER_CONNECTION = 1000
CONNECT_SECONDS = 10


class GrpcCaller:
    """Caller that takes its connections in turn."""

    def __init__(
        self,
        channels: Sequence[aio.Channel],
        token: str | None,
        ignore_eos: bool,
        choices: int = 1,
    ):
        self._ignore_eos = ignore_eos
        self._choices = choices
        self._metadata = metadata_of(token)
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        self._streams = cycle([stub.GenerateStream for stub in stubs])

    def prepare(
        self, prompt: Sequence[int] | str, output_tokens: int, salt: str
    ) -> GenerateStreamRequest:
        sampling = common_pb2.SamplingParams(
            temperature=0.0,
            ignore_eos=self._ignore_eos,
            max_tokens=output_tokens,
            n=self._choices,
        )
        if isinstance(prompt, str):
            return GenerateStreamRequest(text=prompt, sampling=sampling, cache_salt=salt)
        return GenerateStreamRequest(
            token_ids=common_pb2.TokenIds(ids=prompt), sampling=sampling, cache_salt=salt
        )

    async def ask(self, request: GenerateStreamRequest, outcome: Outcome) -> None:
        answer = next(self._streams)(request, metadata=self._metadata, timeout=outcome.deadline)
        message = None
        try:
            async for message in answer:
                count = len(message.delta.token_ids)
                if count:
                    outcome.saw(time.monotonic(), count)
        except aio.AioRpcError as error:
            text = error.details() or ""
            raise Refused(error.code().name, text, _pushback(error)) from None
        finally:
            answer.cancel()
        if message is None or not message.HasField("finish_info"):
            raise Refused(CUT, "the stream ended without FinishInfo")
        usage = message.finish_info.usage
        outcome.prompt_tokens = usage.prompt_tokens
        outcome.cached_tokens = usage.cached_prompt_tokens


@asynccontextmanager
async def grpc_caller(
    address: str, requests: int, credentials: Credentials, ignore_eos: bool, choices: int = 1
) -> AsyncIterator[GrpcCaller]:
    """Connect to a server, with enough connections for this many requests at a time.

    Raises ConfigError if the connections cannot be made in time.
    """
    # Without a pool of their own, channels to one address share a connection.
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(_channel(address, options, credentials.tls))
            for _ in range(1 + requests // CALLS_PER_CONNECTION)
        ]
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await asyncio.gather(*(channel.channel_ready() for channel in channels))
        except TimeoutError:
            raise flag_error(
                "--target", f"grpc://{address}", f"{len(channels)} connections could not be made"
            ) from None
        yield GrpcCaller(channels, credentials.token, ignore_eos, choices)


def _channel(address: str, options: Sequence[tuple[str, int]], tls: TLS | None) -> aio.Channel:
    if tls is None:
        return aio.insecure_channel(address, options=options)
    return aio.secure_channel(address, tls.credentials(), options=options)


def _pushback(error: aio.AioRpcError) -> float | None:
    """Return the seconds after which the server wants to be asked again; None if it does not."""
    for name, value in error.trailing_metadata() or ():
        if name == "grpc-retry-pushback-ms" and str(value).isdecimal():
            return int(value) / 1000
    return None
