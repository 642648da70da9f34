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

from jaxserve.errors import JaxserveError, QueueFullError
from jaxserve.server.core.input_bytes import HeldBytes, InputBytes
from jaxserve.server.core.limits import Limits
from jaxserve.server.grpc.inference import abort_with

GZIP = b"\x1f\x8b"  # no plain message begins so: there is no wire type 7
GZIP_WINDOW = 16 + zlib.MAX_WBITS  # zlib's way to ask for gzip's form
DEFLATE = 8  # method of zlib's head, with which a plain message may begin too
SMALL = 4096  # bytes of a message that is not counted
AT_ONCE = 256  # bytes of a compressed message that is expanded at once: to 256 KiB at most
MAX_WAITING = 64  # messages that wait to be expanded
MAX_AWAITED = 32  # calls without a token whose message has not come
RETRY_SECONDS = 1.0
HEADER_OVERHEAD = 32  # bytes that HTTP/2 counts for each header (RFC 9113, 6.5.2)
Requests = AsyncGenerator[Any]
Parse = Callable[[bytes], Any]


class MessageTooLargeError(JaxserveError):
    code = "RESOURCE_EXHAUSTED"
    http_status = 413
    reason = "REQUEST_TOO_LARGE"


class MetadataTooLargeError(JaxserveError):
    code = "RESOURCE_EXHAUSTED"
    http_status = 431
    reason = "HEADERS_TOO_LARGE"


class SlowSenderError(JaxserveError):
    code = "RESOURCE_EXHAUSTED"
    http_status = 408
    reason = "REQUEST_TIMEOUT"


class MessageError(JaxserveError):
    code = "INVALID_ARGUMENT"
    http_status = 400
    reason = "INVALID_MESSAGE"


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
        self._awaited = AwaitedMessages(limits.slow_client_seconds)
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
        if service == self._open_to_all:
            return self._awaiting_one(handler, limit)
        return self._reading_one(handler, limit)

    def _reading_one(self, handler: Any, limit: int) -> Any:
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        behavior = getattr(handler, kind)
        parse = handler.request_deserializer
        assert not inspect.isasyncgenfunction(behavior), "services write their messages"

        async def answer(data: bytes, context: aio.ServicerContext) -> Any:
            request = None
            try:
                with self._inputs.holding() as held:
                    request = await self._read(data, parse, limit, held, context)
                    return await behavior(request, context)
            except BaseException as error:
                data = b""
                request = None
                release_frames(error)
                raise

        return handler._replace(request_deserializer=None, **{kind: answer})

    def _awaiting_one(self, handler: Any, limit: int) -> Any:
        """Return a handler that is called before its only message has come."""
        parse = handler.request_deserializer

        async def answer(messages: AsyncIterable[bytes], context: aio.ServicerContext) -> None:
            try:
                data = await self._awaited.next_of(messages)
            except JaxserveError as error:
                await abort_with(context, error)
            with self._inputs.holding() as held:
                request = await self._read(data, parse, limit, held, context)
            if handler.response_streaming:
                await handler.unary_stream(request, context)
            else:
                await context.write(await handler.unary_unary(request, context))

        serialize = handler.response_serializer
        return grpc.stream_stream_rpc_method_handler(answer, response_serializer=serialize)

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


class AwaitedMessages:
    """Messages that have not come, of calls that need no token. Lives on the event loop.

    gRPC holds what has come of each, up to --max-message-bytes, and no handler can count it. So few
    are awaited at a time: a further one ends the call that has waited longest. What asks how a
    server is comes whole, and waits for nothing.

    Args:
        seconds: Seconds in which a message has to come.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._scopes = dict[asyncio.Timeout, None]()  # in the order in which they began

    async def next_of(self, messages: AsyncIterable[bytes]) -> bytes:
        """Wait for the next message.

        Raises:
            MessageError: There is none.
            SlowSenderError: It does not come in time, or too many others are awaited.
        """
        if len(self._scopes) >= MAX_AWAITED:
            self._end(next(iter(self._scopes)))
        try:
            async with asyncio.timeout(self._seconds) as scope:
                self._scopes[scope] = None
                try:
                    return await anext(aiter(messages))
                finally:
                    self._scopes.pop(scope, None)
        except StopAsyncIteration:
            raise MessageError("the call has no message") from None
        except TimeoutError:
            problem = f"the message did not come within {self._seconds:g} s (--slow-client-seconds)"
            raise SlowSenderError(f"{problem}, or made room for others") from None

    def _end(self, scope: asyncio.Timeout) -> None:
        del self._scopes[scope]
        scope.reschedule(-1)  # a time in the past: the scope times out at once


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
