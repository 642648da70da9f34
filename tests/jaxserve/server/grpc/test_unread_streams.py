"""Streams that are never read end by time, long before their tokens are too many to hold."""

import asyncio
from pathlib import Path

import pytest

from jaxserve.engine.engine_thread import StepReport
from jaxserve.errors import JaxserveError, SlowConsumerError
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.limits import Limits
from jaxserve.v1 import common_pb2, inference_pb2
from tests.jaxserve.server.grpc.frames import (
    CANCEL,
    INITIAL_WINDOW_SIZE,
    RST_STREAM,
    WINDOW_UPDATE,
    RawConnection,
    connected,
    frame,
    message,
    opened,
    setting,
)
from tests.jaxserve.server.grpc.undisturbed import undisturbed
from tests.jaxserve.server.grpc.vllm_harness import request, serving
from tests.jaxserve.server.harness import Running, until

TOKENS = 20_000  # of each of 16 choices: more than there is time for
LIMITS = Limits(slow_client_seconds=0.3, max_unread_tokens=10**6)
PATIENT = Limits(slow_client_seconds=600.0, max_unread_tokens=10**6)
OWN = inference_pb2.GenerateStreamRequest(
    request_id="unread",
    text="x",
    sampling=common_pb2.SamplingParams(
        max_tokens=TOKENS, seed=1, logprobs=0, ignore_eos=True, n=16
    ),
)
VLLM = request(
    stream=True, request_id="unread", max_tokens=TOKENS, logprobs=0, ignore_eos=True, n=16
)
WIDER = (2**20).to_bytes(4)


METHODS = {
    "GenerateStream": ("/jaxserve.v1.InferenceService/GenerateStream", OWN.SerializeToString()),
    "VllmEngine": ("/vllm.grpc.engine.VllmEngine/Generate", VLLM.SerializeToString()),
}
SIZES = {"max_batch": 32, "max_context": 30_000, "windows": (32,), "prefix_cache": False}


class Endings:
    """Observer that keeps how the request of a stream that is not read has ended."""

    def __init__(self) -> None:
        self.errors: list[JaxserveError | None] = []

    def refused(self, incoming: IncomingRequest, error: JaxserveError) -> None: ...
    def stepped(self, report: StepReport) -> None: ...
    def received(self, answer: Answer, tokens: int, first: bool, seconds: float) -> None: ...

    def ended(self, answer: Answer, error: JaxserveError | None) -> None:
        if answer.id == "unread":
            self.errors.append(error)


@pytest.mark.system
@pytest.mark.parametrize("name", METHODS)
def test_a_stream_that_is_never_read_ends_in_time(tmp_path: Path, name: str) -> None:
    """Whoever reads on after all finds the reason behind the messages that were on their way."""
    endings = Endings()

    async def main() -> None:
        async with (
            serving(tmp_path, limits=LIMITS, seconds=0.002, observers=(endings,), **SIZES) as (
                server,
                _,
            ),
            undisturbed(server) as check,
            connected(server, setting(INITIAL_WINDOW_SIZE, 1024)) as connection,
        ):
            await begin(connection, name)
            await until(lambda: server.service.in_flight)
            await check()
            await until(lambda: not server.service.in_flight)
            (error,) = endings.errors
            assert isinstance(error, SlowConsumerError)
            await server.at_rest()
            assert server.runner.steps < TOKENS
            wider = [frame(WINDOW_UPDATE, 0, stream, WIDER) for stream in (0, 1)]
            await connection.send(b"".join(wider))
            await until(lambda: b"grpc-status\x018" in connection.received)  # RESOURCE_EXHAUSTED
            assert b"not read within 0.3 s (--slow-client-seconds)" in connection.received
            assert not connection.hung_up

    asyncio.run(main())


@pytest.mark.parametrize("ending", ["cancelled", "cut"])
@pytest.mark.parametrize("name", METHODS)
def test_a_client_that_goes_while_a_message_is_written_is_no_incident(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, ending: str
) -> None:
    endings = Endings()

    async def main() -> None:
        async with (
            serving(tmp_path, limits=PATIENT, seconds=0.002, observers=(endings,), **SIZES) as (
                server,
                _,
            ),
            undisturbed(server),
            connected(server, setting(INITIAL_WINDOW_SIZE, 1024)) as connection,
        ):
            await begin(connection, name)
            # What the window takes has gone, and the next message waits for the client.
            await until(lambda: server.runner.steps > 100 and is_writing(server))
            if ending == "cancelled":
                await connection.send(frame(RST_STREAM, 0, 1, CANCEL))
            else:
                connection.writer.transport.abort()
            await until(lambda: not server.service.in_flight)
        assert endings.errors == [None]

    asyncio.run(main())
    assert "incident" not in caplog.text and "Traceback" not in caplog.text


async def begin(connection: RawConnection, name: str) -> None:
    method, data = METHODS[name]
    await connection.send(opened(1, method) + message(1, data))


def is_writing(server: Running) -> bool:
    return any(write.began for write in server.service.slow_clients._writes)
