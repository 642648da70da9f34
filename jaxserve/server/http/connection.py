"""One HTTP connection: uvicorn's protocol on httptools, with bounds on what a client may hold."""

import asyncio
import time
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from jaxserve.errors import JaxserveError, SlowConsumerError
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    HeadersTooLargeError,
    MessageError,
    TooManyConnectionsError,
    closing_response,
    error_response,
    parser_error,
)
from jaxserve.server.http.open_connections import OpenConnections
from jaxserve.server.http.output import Output

HEALTH = ("/health", "/ping")  # the second is Amazon SageMaker's name for it
FIELD_MARKS = 4  # bytes of a header beside its name and value: colon, blank, end of the line
MAX_PIPELINED = 16  # requests on one connection that wait for the answers of those before them
LINGER = 2.0  # seconds in which a client that still sends may read why its request is refused


class Connection(HttpToolsProtocol):
    """A connection whose client has to send and to read in time, and within bounds.

    Every request, from its first byte to the end of its body, has to arrive within
    --slow-client-seconds and --max-body-bytes, whatever its answer is and whenever that was given.
    Of its answers a client has to take 64 KiB, or all that there is, within the same time.

    Args:
        others: The open connections, of which this will be one.
    """

    transport: Output  # type: ignore[assignment]

    def __init__(
        self, *args: Any, others: OpenConnections["Connection"], limits: Limits, **options: Any
    ):
        super().__init__(*args, **options)
        self._others = others
        self._limits = limits
        self._is_served = True  # not beyond the limit of connections
        self._arriving_since: float | None = None  # the request that has not arrived completely
        self._arrived = 0  # bytes of that request, as they came
        self._in_head = True
        self._head_bytes = 0
        self._one_ended = False  # a request, within the bytes that are being parsed
        self._may_stay = False  # the connection, after the answer to the latest request
        self._lingers_since: float | None = None
        self._is_deaf = False  # requests that come are dropped
        self._running: RequestResponseCycle | None = None  # the latest that was begun
        self.parser = self._new_parser()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # What follows a request that ends the connection does not spoil its answer.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    @property
    def is_answering(self) -> bool:
        """Return whether a request has begun whose response has not left completely."""
        if self.cycle is not None and not self.cycle.response_complete:
            return True
        return self.transport.get_write_buffer_size() > 0

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Output(transport, self._close))  # type: ignore[arg-type]
        self._arriving_since = time.monotonic()
        self._is_served = self._others.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.remove(self)
        self._forget_requests()
        super().connection_lost(exc)

    def _forget_requests(self) -> None:
        """Tell all applications that their client is gone, and begin no more of them."""
        queued = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        for cycle in (self._running, self.cycle, *queued):
            if cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()

    def check(self, now: float) -> None:
        """End the connection if its client has been too slow."""
        seconds = self._limits.slow_client_seconds
        if self._lingers_since is not None:
            if now - self._lingers_since > LINGER:
                self.abort()
        elif self.transport.is_read_too_slowly(now, seconds):
            self._others.count_closed(SlowConsumerError.reason)
            self.abort()
        elif self._arriving_since is None:
            return
        elif self.flow.read_paused:  # it is not the client who lets the other one wait
            self._arriving_since = now
        elif now - self._arriving_since > seconds:
            problem = f"the request did not arrive within {seconds:g} s (--slow-client-seconds)"
            self._refuse(BodyTimeoutError(problem))

    def abort(self) -> None:
        """Close the connection at once."""
        self._forget_requests()
        self.transport.abort()

    def _close(self) -> None:
        """Close the connection, a little later if its client is still sending a request."""
        if self.transport.is_closing():
            return
        is_sending = self._arriving_since is not None and self._arrived > 0
        if not (is_sending or self._is_deaf):
            self.transport.close_now()
            return
        self._lingers_since = time.monotonic()
        self._arrived = 0
        self.transport.end()
        self.flow.resume_reading()

    # ---- bytes

    def data_received(self, data: bytes) -> None:
        if self._lingers_since is not None or self._is_deaf:
            self._drop(data)
            return
        self._others.note()
        self._one_ended = False
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._arrived += len(data)
            self._refuse(parser_error(error))
            return
        if not self._one_ended:
            self._arrived += len(data)
        self._check_size()

    def _drop(self, data: bytes) -> None:
        self._arrived += len(data)
        # While answers are owed to the client, more bytes do no harm.
        if self._lingers_since is not None and self._arrived > self._limits.max_body_bytes:
            self.abort()

    def _feed(self, data: bytes) -> None:
        while not self._is_deaf:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                (end_of_head,) = stop.args
                data = self._without_upgrade(data[end_of_head:])

    def _without_upgrade(self, rest: bytes) -> bytes:
        """Return the bytes by which a request is parsed again that asks for another protocol.

        A server may ignore that, but the parser would skip the body. Java's client asks for HTTP/2
        in this way.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserError("this server is no proxy")
        version = self.parser.get_http_version().encode()
        head = [b"%s %s HTTP/%s" % (method, self.url, version)]
        head += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = self._new_parser()
        return b"\r\n".join([*head, b"", rest])

    def _check_size(self) -> None:
        """Refuse a request that is too large, with what lies between the parts of its body."""
        head = self._limits.max_header_bytes
        body = self._limits.max_body_bytes
        if self._arriving_since is None or self._lingers_since is not None:
            return
        if self._in_head and self._arrived > head:
            problem = f"path and headers have at least {self._arrived} bytes; the limit is {head}"
            self._refuse(HeadersTooLargeError(f"{problem} (--max-header-bytes)"))
        elif self._arrived > head + 2 * body:
            problem = f"the body came in at least {self._arrived} bytes; the limit is {body}"
            self._refuse(BodyTooLargeError(f"{problem} (--max-body-bytes)"))

    def _refuse(self, error: JaxserveError) -> None:
        """Answer the request that arrives, unless its answer has begun, and close.

        Requests that came before it are answered first, and then it gets no answer.
        """
        self._others.count_closed(error.reason)
        if not self._in_head and self.pipeline:
            self.pipeline.popleft()  # the request itself
            self._stop_listening()
            return
        is_free = self._running is None or self._running.response_complete
        if self._in_head and not is_free:
            self._stop_listening()
            return
        has_begun = not self._in_head and self._running and self._running.response_started
        if self._arrived and not has_begun:
            self.transport.write(closing_response(error))
        self._forget_requests()
        self.transport.close()

    # ---- what the parser finds

    def on_message_begin(self) -> None:
        if self._is_deaf:
            return
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._arriving_since = time.monotonic()
        self._arrived = 1  # at least; the parser does not say where the request begins
        self._in_head = True
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        if not self._is_deaf:
            self._count_head(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head and not self._is_deaf:  # what stands behind a body in chunks is no header
            self._count_head(len(name) + len(value) + FIELD_MARKS)
            super().on_header(name, value.rstrip(b" \t"))  # RFC 9110, 5.5

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        limit = self._limits.max_header_bytes
        if self._head_bytes > limit:
            problem = f"path and headers have at least {self._head_bytes} bytes; the limit is"
            raise HeadersTooLargeError(f"{problem} {limit} (--max-header-bytes)")

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() or self._is_deaf:
            return
        if httptools.parse_url(self.url).path is None:
            raise MessageError("the request asks for no path")
        self._unset_keepalive_if_required()
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop_listening()
            return
        self.app = self.config.loaded_app
        path = self.url.partition(b"?")[0].decode("latin-1")
        if not self._is_served and path not in HEALTH:
            self._others.count_closed(TooManyConnectionsError.reason)
            self.app = error_response(TooManyConnectionsError(self._limits.max_http_connections))
        super().on_headers_complete()
        self._in_head = False
        # The connection stays only if the request has arrived completely before its answer begins.
        self._may_stay = self.cycle.keep_alive and self._is_served
        self.cycle.keep_alive = False

    def _stop_listening(self) -> None:
        """Close the connection after the answers to the requests so far, of which one is open."""
        self._is_deaf = True
        self._arriving_since = None
        self._arrived = 0
        latest = self.pipeline[0][0] if self.pipeline else self._running
        assert latest is not None
        latest.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        if not self._is_deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() or self._is_deaf:
            return
        self._arriving_since = None
        self._arrived = 0
        self._one_ended = True
        if not self.cycle.response_started:
            # A header behind the body may have ended the connection.
            self.cycle.keep_alive = self._may_stay and self.parser.should_keep_alive()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._others.note()
        super().on_response_complete()

    def shutdown(self) -> None:
        self._may_stay = False
        super().shutdown()
