"""Run uvicorn on the event loop of the server's process."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from functools import partial

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxserve.server.core.limits import Limits
from jaxserve.server.http.listening import begin_no_more, has_waiting, listen
from jaxserve.server.security.tls import Tls

HANDSHAKE = 0.1  # seconds in which a connection that has begun is there to be accepted
LONGEST_QUEUE = 5.0  # seconds in which all connections that wait are accepted
LINGER = 1.0  # seconds without any request, after which a draining server expects no more


class Traffic:
    """Time at which anything last happened on one of a server's connections."""

    def __init__(self) -> None:
        self.last = -math.inf

    def note(self) -> None:
        """Note that something happens now."""
        self.last = time.monotonic()


class Connection(H11Protocol):
    """A connection that is closed when a request's headers do not arrive in time.

    `head_seconds` runs from the connection's beginning, or from the first byte of a later request,
    to its last header. uvicorn limits only the pause between requests, and the application only
    the time of a body.
    """

    def __init__(self, *args: object, head_seconds: float, traffic: Traffic, **options: object):
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._head_seconds = head_seconds
        self._traffic = traffic
        self._head_timer: asyncio.TimerHandle | None = None

    @property
    def is_answering(self) -> bool:
        """Return whether a request has begun whose response has not left completely."""
        if self.cycle is not None and not self.cycle.response_complete:
            return True
        return self.transport.get_write_buffer_size() > 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._traffic.note()
        self._start_timer()

    def on_response_complete(self) -> None:
        self._traffic.note()
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        self._traffic.note()
        super().data_received(data)
        # h11 leaves IDLE once it has all headers of a request.
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._start_timer()
        else:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        # More bytes of the same headers do not extend the time.
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the server's lifecycle."""
        yield


class HttpServer:
    """An HTTP server that holds its port from its creation on; ConfigError if the port is taken."""

    def __init__(self, app: Starlette, host: str, port: int, tls: Tls | None, limits: Limits):
        self._sockets = listen(host, port)
        self._traffic = Traffic()
        self.port: int = self._sockets[0].getsockname()[1]
        config = uvicorn.Config(
            app,
            http=partial(  # type: ignore[arg-type]
                Connection, head_seconds=limits.slow_client_seconds, traffic=self._traffic
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=limits.max_header_bytes,
            timeout_keep_alive=limits.keep_alive_seconds,  # type: ignore[arg-type]
            limit_concurrency=limits.max_http_connections,
        )
        config.load()
        config.ssl = tls.context() if tls else None
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self, failed: Callable[[BaseException], None]) -> None:
        """Serve in a task; `failed` is called with an error that ends it before `stop` does."""

        def ended(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()):
                failed(error)

        self._task = asyncio.create_task(self._server.serve(sockets=self._sockets))
        self._task.add_done_callback(ended)

    @property
    def in_use(self) -> bool:
        """Return whether a request runs, or may come over a connection that is open.

        Proxies repeat no POST that meets a closed connection. So connections stay open until no
        request has come for a while, at the least since the port was closed: of those that a proxy
        keeps, each is closed after its next response.
        """
        if any(each.is_answering for each in self._connections):
            return True
        # A TLS connection counts as one only when its handshake is over.
        may_come = bool(self._connections) or self._server.config.ssl is not None
        return may_come and time.monotonic() - self._traffic.last < LINGER

    @property
    def _connections(self) -> list[Connection]:
        open_ones = self._server.server_state.connections
        return [each for each in open_ones if isinstance(each, Connection)]

    async def close_port(self) -> None:
        """Refuse new connections, and accept those that have begun."""
        if not self._server.started:
            return  # uvicorn does not listen yet; `stop` closes the sockets
        for listener in self._sockets:
            begin_no_more(listener)
        self._traffic.note()
        until = time.monotonic() + LONGEST_QUEUE
        await asyncio.sleep(HANDSHAKE)
        while any(map(has_waiting, self._sockets)) and time.monotonic() < until:
            await asyncio.sleep(0)  # uvloop accepts one in each of its turns
        for server in self._server.servers:
            server.close()

    async def stop(self, grace: float) -> None:
        """Close the port and all connections; open responses have `grace` seconds to end."""
        # With 0, uvicorn would give up before it looks whether a response is still open.
        self._server.config.timeout_graceful_shutdown = max(grace, 0.01)  # type: ignore[assignment]
        self._server.should_exit = True
        while self._task and not self._task.done():
            await asyncio.wait((self._task,), timeout=LINGER)
            self._abort_silent()
        for listener in self._sockets:
            listener.close()

    def _abort_silent(self) -> None:
        """End connections that are closed here, and whose clients do not confirm it as TLS asks."""
        for connection in self._connections:
            if connection.transport.is_closing() and not connection.is_answering:
                connection.transport.abort()
