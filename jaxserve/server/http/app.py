"""Build the HTTP application: its routes, and the checks that precede every one of them."""

from collections.abc import Awaitable, Callable, Iterable, Sequence

from prometheus_client.metrics_core import Metric
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.errors import RequestError
from jaxserve.server.core.admission import MAX_ID_BYTES
from jaxserve.server.core.input_bytes import InputBytes
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.agents.messages.endpoint import Messages
from jaxserve.server.http.agents.responses.endpoint import Responses
from jaxserve.server.http.anthropic_errors import ID_HEADER as REQUEST_ID
from jaxserve.server.http.checks import Callers, HostCheck, OneMeaning, TokenCheck
from jaxserve.server.http.connection import HEALTH
from jaxserve.server.http.embeddings import Embeddings
from jaxserve.server.http.errors import error_response, refuse_route
from jaxserve.server.http.generation import Generation
from jaxserve.server.http.ignored import HEADER as IGNORED_HEADER
from jaxserve.server.http.ignored import TellIgnored
from jaxserve.server.http.info import Info
from jaxserve.server.http.page import Live, Page
from jaxserve.server.http.replies import ID_HEADER
from jaxserve.server.http.tokenization import Tokenization
from jaxserve.server.readiness import Readiness
from jaxserve.server.security.auth import BearerTokens
from jaxserve.server.security.seals import Seals

NO_OTHERS = Callers()
HELD = "input_bytes"  # in a request's state
# Headers of answers that pages of other origins may read.
EXPOSED = (ID_HEADER, REQUEST_ID, IGNORED_HEADER, "retry-after", "retry-after-ms", "x-should-retry")


def new_app(
    readiness: Readiness,
    tokens: BearerTokens,
    limits: Limits,
    metrics: Callable[[], Awaitable[bytes]],
    families: Callable[[], Iterable[Metric]] = tuple,
    callers: Callers = NO_OTHERS,
    inputs: InputBytes | None = None,
    seals: Seals | None = None,
) -> Starlette:
    """Return the ASGI application that serves the gate's model.

    `metrics` renders Prometheus's text format. `families` returns the metrics for the live view,
    without the numbers by expert. `inputs` counts the bytes of requests, if other servers
    share their limit. `seals` are those of thoughts that clients keep; by default they end with the
    process.
    """
    seals = seals or Seals()
    generation = Generation(readiness, limits)
    tokenization = Tokenization(readiness, limits)
    responses = Responses(readiness, limits, seals)
    messages = Messages(readiness, limits, seals)
    info = Info(readiness, metrics)
    page = Page()
    app = Starlette(
        routes=[
            Route("/v1/completions", generation.completions, methods=["POST"]),
            Route("/v1/chat/completions", generation.chat, methods=["POST"]),
            Route("/v1/embeddings", Embeddings(readiness, limits).embeddings, methods=["POST"]),
            Route("/v1/messages", messages.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
            Route("/v1/responses", responses.create, methods=["POST"]),
            Route("/v1/responses", responses.upgrade, methods=["GET"]),
            Route("/v1/responses/input_tokens", responses.input_tokens, methods=["POST"]),
            Route("/v1/responses/compact", responses.compact, methods=["POST"]),
            Route("/v1/responses/{id}", responses.retrieve, methods=["GET"]),
            Route("/v1/responses/{id}", responses.delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/input_items", responses.input_items, methods=["GET"]),
            Route("/v1/responses/{id}/cancel", responses.cancel, methods=["POST"]),
            Route("/v1/models", info.models),
            Route("/v1/models/{id:path}", info.model),  # names may have slashes
            Route("/tokenize", tokenization.tokenize, methods=["POST"]),
            Route("/detokenize", tokenization.detokenize, methods=["POST"]),
            Route("/tokenizer_info", tokenization.info),
            Route("/version", info.version),
            Route("/metrics", info.metrics),
            *(Route(path, info.health) for path in HEALTH),
            Route("/live", Live(readiness, limits, families).live),
            Route("/", page.index),
            Route("/page/{path:path}", page.file),
        ],
        # The first is the outermost: a refused request has its id echoed too, and a body is counted
        # only behind the token.
        middleware=[
            *([_cors(callers.origins)] if callers.origins else []),
            Middleware(EchoId),
            Middleware(WithoutSlash),
            Middleware(TellIgnored),
            Middleware(SendElsewhere, readiness),
            Middleware(OneMeaning),
            *([Middleware(HostCheck, callers.hosts)] if not tokens.clients else []),
            Middleware(TokenCheck, tokens),
            Middleware(CountInput, inputs or InputBytes(limits.max_input_bytes)),
        ],
        exception_handlers={HTTPException: refuse_route},
    )
    app.router.redirect_slashes = False  # WithoutSlash answers at once
    return app


def _cors(origins: Sequence[str]) -> Middleware:
    """Return what lets pages of these origins call, and answers the browser's question first."""
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST", "DELETE"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=EXPOSED,
    )


class WithoutSlash:
    """Answers a path that ends with a slash as the same path without it."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self._app(scope, receive, send)


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


class CountInput:
    """Counts the body of a request until the request has ended, as `request.state.input_bytes`.

    A body without room raises QueueFullError where the application reads it.
    """

    def __init__(self, app: ASGIApp, inputs: InputBytes):
        self._app = app
        self._inputs = inputs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._inputs.holding() as held:
            scope.setdefault("state", {})[HELD] = held

            async def counted() -> Message:
                message = await receive()
                held.add(len(message.get("body", b"")))
                return message

            await self._app(scope, counted, send)


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
