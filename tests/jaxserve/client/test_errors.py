"""Errors of the server are raised by the client as they are."""

import asyncio
import inspect
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from jaxserve import errors
from jaxserve.client import CallError, Client
from jaxserve.client.errors import BY_REASON, error_of
from jaxserve.errors import (
    CapacityError,
    ChatError,
    ContextLengthError,
    GrammarError,
    JaxserveError,
    QueueFullError,
    RequestError,
    RequestIdInUseError,
)
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.status import status_of, trailers
from tests.jaxserve.client.test_client import GREEDY, Looping, both, opened
from tests.jaxserve.server.harness import running

OF_A_KIND: dict[type[JaxserveError], tuple[Any, ...]] = {
    RequestError: ("sampling.top_k", "is -1"),
    ContextLengthError: ("text", "has 9 tokens"),
    CapacityError: ("text", "has 9 tokens"),
    ChatError: ("the template refuses", "messages"),
    GrammarError: ("sampling.json_schema", "cannot be used"),
    QueueFullError: ("9 requests wait already", 1.25),
}
CLASSES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if kind not in (errors.UnavailableError, JaxserveError)
]


class Failure:
    """A failed call, as grpc shows it."""

    def __init__(self, code: str, text: str, trailing: Any):
        self._code = grpc.StatusCode[code]
        self._text = text
        self._trailing = trailing

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._text

    def trailing_metadata(self) -> Any:
        return self._trailing


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_crosses_the_wire(kind: type[JaxserveError]) -> None:
    sent = kind(*OF_A_KIND.get(kind, ("one line",)))
    got = error_of(Failure(sent.code, str(sent), trailers(sent)))
    assert type(got) is kind
    assert str(got) == str(sent) and got.retry_after == sent.retry_after and got.code == sent.code
    if isinstance(sent, RequestError):
        assert isinstance(got, RequestError) and (got.field, got.problem) == (
            sent.field,
            sent.problem,
        )


def test_the_table_has_no_other_classes() -> None:
    assert set(BY_REASON.values()) == set(CLASSES)


def status(domain: str, reason: str) -> bytes:
    packed = status_of(RequestError("x", "y"))
    info = error_details_pb2.ErrorInfo(domain=domain, reason=reason)
    del packed.details[:]
    packed.details.add().Pack(info)
    return packed.SerializeToString()


@pytest.mark.parametrize(
    "trailing",
    [
        (),
        None,
        (("grpc-status-details-bin", b"\xff\xff"),),
        (("grpc-status-details-bin", status_pb2.Status(code=3).SerializeToString()),),
        (("grpc-status-details-bin", status("googleapis.com", "INVALID_FIELD")),),
        (("grpc-status-details-bin", status("jaxserve", "OF_A_NEWER_SERVER")),),
    ],
)
def test_without_a_word_of_jaxserve(trailing: Any) -> None:
    got = error_of(Failure("INVALID_ARGUMENT", "two\nlines", trailing))
    assert isinstance(got, CallError) and isinstance(got, JaxserveError)
    assert (got.code, got.details, str(got)) == (
        "INVALID_ARGUMENT",
        "two\nlines",
        "INVALID_ARGUMENT: two lines",
    )


def test_a_request_error_without_a_field() -> None:
    trailing = (("grpc-status-details-bin", status("jaxserve", "INVALID_FIELD")),)
    got = error_of(Failure("INVALID_ARGUMENT", "bad", trailing))
    assert isinstance(got, RequestError) and (got.field, got.problem, str(got)) == (
        "request",
        "bad",
        "bad",
    )


@both
def test_over_a_socket(tmp_path: Path, kind: type) -> None:
    async def main() -> None:
        async with running(tmp_path) as server, opened(kind, server.address) as client:
            with pytest.raises(ContextLengthError, match="512") as caught:
                await client.generate("x" * 600)
            assert caught.value.field == "text" and isinstance(
                caught.value.__cause__, grpc.RpcError
            )
            with pytest.raises(RequestError) as bad:
                await client.events("stream", "x", stop_token_ids=[999])
            assert bad.value.field == "sampling.stop_token_ids" and isinstance(
                bad.value.__cause__, grpc.RpcError
            )
            with pytest.raises(RequestError) as empty:
                await client.chat([])
            assert empty.value.field == "messages"
            await server.at_rest()

    asyncio.run(main())


@both
def test_an_id_in_flight_and_a_full_queue(tmp_path: Path, kind: type) -> None:
    async def main() -> None:
        limits = Limits(max_waiting_requests=1)
        async with (
            running(tmp_path, seconds=0.02, limits=limits, max_batch=1) as server,
            opened(kind, server.address, retries=0) as client,
            Looping(server.address) as other,
        ):
            long = {**GREEDY, "max_tokens": 400}
            first = other.stream("x", request_id="a", **long)
            await anext(first)
            with pytest.raises(RequestIdInUseError, match="'a'"):
                await client.generate("x", request_id="a", **GREEDY)
            second = asyncio.create_task(other.generate("x", **long))
            while not server.service._load.queue:
                await asyncio.sleep(0.005)
            with pytest.raises(QueueFullError, match="max-waiting-requests") as full:
                await client.generate("x", **GREEDY)
            assert full.value.retry_after and 0.1 <= full.value.retry_after <= 60
            await first.close()
            second.cancel()
            await server.at_rest()

    asyncio.run(main())


@both
def test_nobody_listens(kind: type) -> None:
    async def main() -> None:
        async with opened(kind, "127.0.0.1:1", retries=0) as client:
            with pytest.raises(CallError) as caught:
                await client.generate("x")
            assert caught.value.code == "UNAVAILABLE" and isinstance(
                caught.value.__cause__, grpc.RpcError
            )

    asyncio.run(main())


@pytest.mark.system
@both
def test_deadlines(tmp_path: Path, kind: type) -> None:
    async def main() -> None:
        async with (
            running(tmp_path, seconds=0.02) as server,
            opened(kind, server.address, timeout=0.15) as client,
        ):
            long = {**GREEDY, "max_tokens": 400}
            for call in (client.generate("x", **long), client.events("stream", "x", **long)):
                with pytest.raises(JaxserveError) as caught:
                    await call
                assert caught.value.code == "DEADLINE_EXCEEDED"
                await server.at_rest()
            assert max(server.runner.launches.values(), default=0) < 400, "one ran to its end"
            some = {**GREEDY, "max_tokens": 10}  # 0.2 s
            for seconds in (60, float("inf")):
                assert (
                    await client.generate("x", timeout=seconds, **some)
                ).usage.completion_tokens == 10

    asyncio.run(main())


def test_a_deadline_is_a_call_error_of_the_client() -> None:
    """The client's own clock ends the call, whatever the server would have answered."""
    with Client("127.0.0.1:1", retries=0) as client, pytest.raises(CallError):
        client.generate("x", timeout=1e-6)
