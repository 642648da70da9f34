"""uvicorn on the event loop that is there already."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
from starlette.applications import Starlette

from jaxserve.errors import ConfigError
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.connection import Connection
from jaxserve.server.security.tls import Tls


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the lifecycle's."""
        yield


class HttpServer:
    """Listens from its creation on; ConfigError when the port is taken."""

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
        """failed: called with what ended the server, if anything but `stop` does."""

        def ended(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()):
                failed(error)

        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        self._task.add_done_callback(ended)

    async def stop(self, grace: float) -> None:
        """Close; open responses have so many seconds."""
        self._server.config.timeout_graceful_shutdown = max(grace, 0.01)  # type: ignore[assignment] # 0: never in time
        self._server.should_exit = True
        if self._task:
            await asyncio.wait((self._task,))
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(
        family, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )  # or asyncio leaves TCP_NODELAY off
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--http-port {port}: cannot listen on {host}:{port}: {error.strerror}"
        ) from None
    listener.setblocking(False)
    return listener
