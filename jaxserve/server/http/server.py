"""Run uvicorn on the event loop of the server's process."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
from starlette.applications import Starlette

from jaxserve.server.core.limits import Limits
from jaxserve.server.http.connection import Connection
from jaxserve.server.http.listening import begin_no_more, has_waiting, listen
from jaxserve.server.http.open_connections import OpenConnections
from jaxserve.server.security.tls import Tls

HANDSHAKE = 0.1  # seconds in which a connection that has begun is there to be accepted
LONGEST_QUEUE = 5.0  # seconds in which all connections that wait are accepted
TAIL = 3.0  # seconds to read what TLS still holds of an answer, when a server ends
LINGER = 1.0  # seconds without any request, after which a draining server expects no more


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the server's lifecycle."""
        yield


class HttpServer:
    """An HTTP server that holds its port from its creation on; ConfigError if the port is taken."""

    def __init__(self, app: Starlette, host: str, port: int, tls: Tls | None, limits: Limits):
        self._sockets = listen(host, port)
        self._connections = OpenConnections[Connection](limits)
        self.port: int = self._sockets[0].getsockname()[1]
        config = uvicorn.Config(
            app,
            http=partial(Connection, others=self._connections, limits=limits),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=limits.keep_alive_seconds,  # type: ignore[arg-type]
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
        connections = self._connections.all
        if any(each.is_answering for each in connections):
            return True
        # A TLS connection counts as one only when its handshake is over.
        may_come = bool(connections) or self._server.config.ssl is not None
        return may_come and time.monotonic() - self._connections.last_traffic < LINGER

    async def close_port(self) -> None:
        """Refuse new connections, and accept those that have begun."""
        if not self._server.started:
            return  # uvicorn does not listen yet; `stop` closes the sockets
        for listener in self._sockets:
            begin_no_more(listener)
        self._connections.note()
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
        for connection in self._connections.all:
            if connection.transport.is_closing_for(TAIL) and not connection.is_answering:
                connection.abort()
