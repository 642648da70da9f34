"""Run uvicorn on the event loop of the server's process."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxserve.errors import ConfigError, flag_text
from jaxserve.server.core.limits import Limits
from jaxserve.server.security.tls import Tls


class Connection(H11Protocol):
    """A connection that is closed when a request's headers do not arrive in time.

    `head_seconds` runs from the connection's beginning, or from the first byte of a later request,
    to its last header. uvicorn limits only the pause between requests, and the application only
    the time of a body.
    """

    def __init__(self, *args: object, head_seconds: float, **options: object):
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._head_seconds = head_seconds
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
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
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=partial(Connection, head_seconds=limits.slow_client_seconds),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=limits.max_header_bytes,
            timeout_keep_alive=30,
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

        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        self._task.add_done_callback(ended)

    async def stop(self, grace: float) -> None:
        """Close the port; open responses have `grace` seconds to end."""
        # With 0, uvicorn would give up before it looks whether a response is still open.
        self._server.config.timeout_graceful_shutdown = max(grace, 0.01)  # type: ignore[assignment]
        self._server.should_exit = True
        if self._task:
            await asyncio.wait((self._task,))
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets whose protocol is given as TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            flag_text("--http-port", port, f"nothing can listen on {host}:{port}: {error.strerror}")
        ) from None
    listener.setblocking(False)
    return listener
