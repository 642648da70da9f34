"""Requests to vllm.grpc.engine.VllmEngine on the fake device, and what comes back."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from jaxserve.server.grpc.server import GrpcEndpoint
from jaxserve.server.grpc.vllm import vllm_endpoint
from jaxserve.server.readiness import Readiness
from jaxserve.server.security.auth import BearerTokens
from tests.byte_tokenizer import ByteTokenizer
from tests.jaxserve.server.grpc.test_inference import TEXT
from tests.jaxserve.server.harness import Running, running

IDS = ByteTokenizer().encode(TEXT)


@asynccontextmanager
async def serving(
    folder: Path, **given: Any
) -> AsyncIterator[tuple[Running, vllm_engine_pb2_grpc.VllmEngineStub]]:
    tokens = given.get("tokens") or BearerTokens()

    def endpoints(readiness: Readiness) -> tuple[GrpcEndpoint, ...]:
        return (vllm_endpoint(readiness, tokens),)

    async with running(folder, endpoints=endpoints, **given) as server:
        yield server, vllm_engine_pb2_grpc.VllmEngineStub(server.channel)


def request(stream: bool = False, request_id: str = "", **sampling: Any) -> pb.GenerateRequest:
    """Make a request for TEXT, whose answer is `expected`."""
    params = pb.SamplingParams(**{"seed": 1, "max_tokens": 8, "temperature": 0} | sampling)
    tokenized = pb.TokenizedInput(original_text="for people", input_ids=IDS)
    return pb.GenerateRequest(
        request_id=request_id, tokenized=tokenized, sampling_params=params, stream=stream
    )


async def answered(
    engine: vllm_engine_pb2_grpc.VllmEngineStub, asked: pb.GenerateRequest
) -> tuple[list[pb.GenerateStreamChunk], list[pb.GenerateComplete]]:
    """Return the chunks of a stream, and the messages that complete its choices."""
    messages = [message async for message in engine.Generate(asked)]
    kinds = [message.WhichOneof("response") for message in messages]
    assert kinds == sorted(kinds)
    chunks = [message.chunk for message in messages if message.HasField("chunk")]
    return chunks, [message.complete for message in messages if message.HasField("complete")]


async def refused(call: Any, code: str) -> tuple[str, str]:
    """Return the field that the error names, if any, and the error's text."""
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode[code], caught.value
    bad = error_details_pb2.BadRequest()
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    assert status is not None
    found = [bad.field_violations[0].field for detail in status.details if detail.Unpack(bad)]
    return "".join(found), caught.value.details() or ""


async def failed(call: Any) -> grpc.StatusCode:
    """Return the status of a unary call that fails."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return caught.value.code()
