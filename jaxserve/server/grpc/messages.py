"""Messages of gRPC calls: their expansion, and bounds on their bytes."""

import asyncio
import inspect
import traceback
import zlib
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Set
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio  # type: ignore[attr-defined]

from jaxserve.errors import JaxserveError, QueueFullError, SlowConsumerError
from jaxserve.server.core.input_bytes import HeldBytes, InputBytes
from jaxserve.server.core.limits import Limits
from jaxserve.server.grpc.awaited_messages import MAX_AWAITED, AwaitedMessages
from jaxserve.server.grpc.errors import (
    MessageError,
    MessageTooLargeError,
    MetadataTooLargeError,
)
from jaxserve.server.grpc.inference import abort_with

GZIP = b"\x1f\x8b"  # no plain message begins so: there is no wire type 7
GZIP_WINDOW = 16 + zlib.MAX_WBITS  # zlib's way to ask for gzip's form
DEFLATE = 8  # method of zlib's head, with which a plain message may begin too
SMALL = 4096  # bytes of a message that is not counted
AT_ONCE = 256  # bytes of a compressed message that is expanded at once: to 256 KiB at most
MAX_WAITING = 64  # messages that wait to be expanded
RETRY_SECONDS = 1.0
HEADER_OVERHEAD = 32  # bytes that HTTP/2 counts for each header (RFC 9113, 6.5.2)
Requests = AsyncGenerator[Any]
Parse = Callable[[bytes], Any]


class MetadataLimit(aio.ServerInterceptor):
    """Refuses calls whose metadata exceeds --max-header-bytes.

    gRPC has this limit too, but not for clients that do not acknowledge its settings.
    """

    def __init__(self, limits: Limits):
        self._limit = limits.max_header_bytes

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        metadata = handler_call_details.invocation_metadata
        size = sum(len(key) + len(value) + HEADER_OVERHEAD for key, value in metadata)
        if size > self._limit:
            problem = f"the metadata has {size} bytes; the limit is {self._limit}"
            return refusing(MetadataTooLargeError(f"{problem} (--max-header-bytes)"))
        return await continuation(handler_call_details)


def refusing(error: JaxserveError) -> grpc.RpcMethodHandler:
    """Return a handler that ends every call with an error."""

    async def refuse(requests: Any, context: aio.ServicerContext) -> None:
        await abort_with(context, error)

    # A handler of streams is called before any message is read.
    return grpc.stream_stream_rpc_method_handler(refuse)


class MessageReader(aio.ServerInterceptor):
    """Expands and parses the messages of calls, and bounds their bytes.

    gRPC itself would expand every message before anything could count it: 1,024 calls of 32 KB
    each become 32 GB. So it hands them over as they come (`grpc.per_message_decompression`).

    Args:
        small: Full names of services that take small messages only. Their calls need no token, or
            last as long as their clients like.
        open_to_all: Full name of the one whose calls need no token.
    """

    def __init__(self, limits: Limits, inputs: InputBytes, small: Set[str], open_to_all: str):
        self._open_to_all = open_to_all
        self._seconds = limits.slow_client_seconds
        self._awaited = AwaitedMessages(self._seconds)
        self._awaited_of_all = AwaitedMessages(self._seconds, MAX_AWAITED)
        self._limit = limits.max_message_bytes
        self._inputs = inputs
        self._small = small
        # One after the other, so that no more than one is expanded and not counted: between the
        # end of the lock and the count nothing else runs.
        self._expanding = asyncio.Lock()
        self._waiting = 0

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method
            return None
        service = service_of(handler_call_details.method)
        limit = SMALL if service in self._small else self._limit
        if handler.request_streaming:
            return self._reading_many(handler, limit)
        awaited = self._awaited_of_all if service == self._open_to_all else self._awaited
        return self._reading_one(handler, limit, awaited)

    def _reading_one(self, handler: Any, limit: int, awaited: AwaitedMessages) -> Any:
        """Return a handler that reads the only message of its calls, and writes the answers.

        gRPC would read the message before it calls a handler of unary calls, and would send its
        answer, however long the client takes for either.
        """
        behavior = handler.unary_stream or handler.unary_unary
        parse = handler.request_deserializer
        assert not inspect.isasyncgenfunction(behavior), "services write their messages"

        async def answer(messages: AsyncIterable[bytes], context: aio.ServicerContext) -> None:
            data: bytes | None = None
            request = None
            try:
                with self._inputs.holding() as held:
                    data = await self._next_of(messages, awaited, context)
                    request = await self._read(data, parse, limit, held, context)
                    response = await behavior(request, context)
                if not handler.response_streaming:
                    await self._write(response, context)
            except BaseException as error:
                data = None
                request = None
                release_frames(error)
                raise

        serialize = handler.response_serializer
        return grpc.stream_stream_rpc_method_handler(answer, response_serializer=serialize)

    async def _next_of(
        self, messages: AsyncIterable[bytes], awaited: AwaitedMessages, context: Any
    ) -> bytes:
        """Return the next message; end the call without one."""
        try:
            return await awaited.next_of(messages)
        except JaxserveError as error:
            await abort_with(context, error)
            raise AssertionError("a call that was ended raises") from None

    async def _write(self, response: Any, context: aio.ServicerContext) -> None:
        """Write a whole answer, for which its client has a time."""
        try:
            async with asyncio.timeout(self._seconds):
                # On its own: cut off in one batch with the message, it would be sent again, which
                # gRPC takes for an error.
                await context.send_initial_metadata(())
                await context.write(response)
        except aio.InternalError:  # the client cancels or hangs up meanwhile
            raise asyncio.CancelledError from None
        except TimeoutError:
            problem = f"the answer was not read within {self._seconds:g} s (--slow-client-seconds)"
            await abort_with(context, SlowConsumerError(problem))

    def _reading_many(self, handler: Any, limit: int) -> Any:
        behavior = handler.stream_stream
        parse = handler.request_deserializer
        assert inspect.isasyncgenfunction(behavior), "reflection yields its messages"

        async def read(messages: AsyncIterable[bytes], context: aio.ServicerContext) -> Requests:
            async for data in messages:
                with self._inputs.holding() as held:
                    yield await self._read(data, parse, limit, held, context)

        async def answer(messages: AsyncIterable[bytes], context: aio.ServicerContext) -> Requests:
            async for response in behavior(read(messages, context), context):
                yield response

        return handler._replace(request_deserializer=None, stream_stream=answer)

    async def _read(
        self, data: bytes, parse: Parse, limit: int, held: HeldBytes, context: aio.ServicerContext
    ) -> Any:
        """Return a message; end the call if the message cannot be read, or is too much."""
        try:
            if is_compressed(data):
                self._count(data, held)
                data = await self._expanded(data, limit)
            check_size(len(data), limit)
            self._count(data, held)
            return parse(data)
        except DecodeError:
            problem = "the message cannot be read: it is not what the method takes"
            await abort_with(context, MessageError(problem))
        except JaxserveError as error:
            await abort_with(context, error)

    def _count(self, data: bytes, held: HeldBytes) -> None:
        if len(data) > SMALL:  # small messages end requests, or tell how the server is
            held.add(len(data))

    async def _expanded(self, data: bytes, limit: int) -> bytes:
        """Return a message without its compression; see `expand`."""
        if len(data) <= AT_ONCE:
            return expand(data, limit)
        if self._waiting >= MAX_WAITING:
            problem = f"{MAX_WAITING} compressed messages wait to be expanded already"
            raise QueueFullError(problem, RETRY_SECONDS)
        self._waiting += 1
        try:
            async with self._expanding:
                return await asyncio.to_thread(expand, data, limit)
        finally:
            self._waiting -= 1


def service_of(method: str) -> str:
    """Return the full name of the service of /SERVICE/METHOD."""
    return method.rsplit("/", 1)[0].lstrip("/")


def release_frames(error: BaseException) -> None:
    """Drop the variables of the functions that an error has left, and with them its message.

    gRPC keeps the error of a call in a cycle of references, which is collected much later.
    """
    left: BaseException | None = error
    while left is not None:
        traceback.clear_frames(left.__traceback__)
        left = left.__context__


def check_size(size: int, limit: int) -> None:
    """Raise MessageTooLargeError for a message of more than `limit` bytes."""
    if size > limit:
        raise MessageTooLargeError(
            f"the message has at least {size} bytes; the limit is {limit} (--max-message-bytes)"
        )


def is_compressed(data: bytes) -> bool:
    """Return whether a message is compressed by gzip, or perhaps as gRPC's deflate (zlib)."""
    if data.startswith(GZIP):
        return True
    # RFC 1950, 2.2: method, window, and a check of both.
    is_zlib = len(data) > 1 and data[0] & 15 == DEFLATE and data[0] >> 4 <= 7
    return is_zlib and int.from_bytes(data[:2]) % 31 == 0


def expand(data: bytes, limit: int) -> bytes:
    """Return a message without its compression, or as it is if it only looks like zlib.

    Raises:
        MessageTooLargeError: It has more than `limit` bytes.
        MessageError: It begins as gzip, and is none.
    """
    is_gzip = data.startswith(GZIP)
    decoder = zlib.decompressobj(GZIP_WINDOW if is_gzip else zlib.MAX_WBITS)
    try:
        expanded = decoder.decompress(data, limit + 1)
    except zlib.error:
        expanded = b""
    check_size(len(expanded), limit)
    if decoder.eof and not decoder.unused_data:  # the checksum at the end is right
        return expanded
    if is_gzip:
        raise MessageError("the compressed message cannot be expanded")
    return data
