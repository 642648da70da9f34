"""Build the HTTP application: its routes, and the checks that precede every one of them."""

from collections.abc import Awaitable, Callable, Iterable

from prometheus_client.metrics_core import Metric
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.errors import JaxserveError, RequestError
from jaxserve.server.core.admission import MAX_ID_BYTES
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.embeddings import Embeddings
from jaxserve.server.http.errors import (
    BodyError,
    HeadersTooLargeError,
    error_response,
    refuse_route,
)
from jaxserve.server.http.generation import Generation
from jaxserve.server.http.info import Info, Tokenization
from jaxserve.server.http.page import Live, Page, is_page
from jaxserve.server.http.replies import ID_HEADER
from jaxserve.server.readiness import Readiness
from jaxserve.server.security.auth import BearerTokens

HEALTH = "/health"


def new_app(
    readiness: Readiness,
    tokens: BearerTokens,
    limits: Limits,
    metrics: Callable[[], Awaitable[bytes]],
    families: Callable[[], Iterable[Metric]] = tuple,
) -> Starlette:
    """Return the ASGI application that serves the gate's model.

    `metrics` renders Prometheus's text format. `families` returns the metrics for the live view,
    without the numbers by expert.
    """
    generation = Generation(readiness, limits)
    tokenization = Tokenization(readiness, limits)
    info = Info(readiness, metrics)
    page = Page()
    app = Starlette(
        routes=[
            Route("/v1/completions", generation.completions, methods=["POST"]),
            Route("/v1/chat/completions", generation.chat, methods=["POST"]),
            Route("/v1/embeddings", Embeddings(readiness, limits).embeddings, methods=["POST"]),
            Route("/v1/models", info.models),
            Route("/v1/models/{id:path}", info.model),  # names may have slashes
            Route("/tokenize", tokenization.tokenize, methods=["POST"]),
            Route("/detokenize", tokenization.detokenize, methods=["POST"]),
            Route("/version", info.version),
            Route("/metrics", info.metrics),
            Route(HEALTH, info.health),
            Route("/live", Live(readiness, limits, families).live),
            Route("/", page.index),
            Route("/page/{path:path}", page.file),
        ],
        # The first is the outermost: a refused request has its id echoed too, and the size of the
        # headers is checked before the token in them is read.
        middleware=[
            Middleware(EchoId),
            Middleware(SendElsewhere, readiness),
            Middleware(HeaderLimit, limits),
            Middleware(OneBodyLength),
            Middleware(TokenCheck, tokens),
        ],
        exception_handlers={HTTPException: refuse_route},
    )
    # A path with a slash too many is an error, not a redirect.
    app.router.redirect_slashes = False
    return app


class EchoId:
    """Copies a request's X-Request-Id header to its response, for searching logs.

    An id that is longer than requests may have is refused.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(ID_HEADER) if scope["type"] == "http" else None
        if given is not None and len(given) > MAX_ID_BYTES:
            problem = f"has {len(given)} bytes; the limit is {MAX_ID_BYTES}"
            return await error_response(RequestError(ID_HEADER, problem))(scope, receive, send)

        async def echoing(message: Message) -> None:
            if message["type"] == "http.response.start" and given is not None:
                MutableHeaders(scope=message)[ID_HEADER] = given
            await send(message)

        await self._app(scope, receive, echoing)


class SendElsewhere:
    """Lets the client of a server that ends open a new connection for its next request."""

    def __init__(self, app: ASGIApp, readiness: Readiness):
        self._app = app
        self._readiness = readiness

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._readiness.is_ending:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive, closing)


class HeaderLimit:
    """Refuses requests whose path and headers exceed --max-header-bytes.

    h11 has a limit of its own, but applies it only to headers that arrive in several parts.
    """

    def __init__(self, app: ASGIApp, limits: Limits):
        self._app = app
        self._limit = limits.max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http":
            size = (
                len(scope["raw_path"])
                + len(scope["query_string"])
                + sum(len(name) + len(value) for name, value in scope["headers"])
            )
            if size > self._limit:
                problem = (
                    f"path and headers have {size} bytes; the limit is {self._limit} "
                    f"(--max-header-bytes)"
                )
                answer = error_response(HeadersTooLargeError(problem))
        await answer(scope, receive, send)


class OneBodyLength:
    """Refuses requests that give two lengths of their body, and closes their connections.

    A proxy that believes the other length would take the rest for a request (RFC 9112, 6.1).
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if "content-length" in headers and "transfer-encoding" in headers:
                problem = "the headers have content-length and transfer-encoding; send one of them"
                answer = error_response(BodyError(problem), {"connection": "close"})
        await answer(scope, receive, send)


class TokenCheck:
    """Refuses requests without a valid bearer token.

    Health checks need none, nor does the page, whose files are the same on every server.
    """

    def __init__(self, app: ASGIApp, tokens: BearerTokens):
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and scope["path"] != HEALTH and not is_page(scope["path"]):
            try:
                self._tokens.check(Headers(scope=scope).getlist("authorization"), admin=False)
            except JaxserveError as error:
                answer = error_response(error)
        await answer(scope, receive, send)
