"""The HTTP face: OpenAI's API, what vLLM's clients expect beside it, health, metrics and a page for
people.
"""

from collections.abc import Awaitable, Callable, Iterable

from prometheus_client.metrics_core import Metric
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.errors import JaxserveError
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.embeddings import Embeddings
from jaxserve.server.http.errors import HeadersTooLargeError, refusal, refuse_route
from jaxserve.server.http.generation import Generation
from jaxserve.server.http.ids import EchoId
from jaxserve.server.http.info import Info
from jaxserve.server.http.live import Live
from jaxserve.server.http.page import Page, is_page
from jaxserve.server.http.tokenize import Tokenization
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
    """The ASGI application over what stands behind the gate.

    metrics: renders Prometheus's text format. families: the same numbers for the live view, without
    experts' tokens.
    """
    generation, embeddings = Generation(readiness, limits), Embeddings(readiness, limits)
    tokenization, info = Tokenization(readiness, limits), Info(readiness, metrics)
    live, page = Live(readiness, limits, families), Page()
    app = Starlette(
        routes=[
            Route("/v1/completions", generation.completions, methods=["POST"]),
            Route("/v1/chat/completions", generation.chat, methods=["POST"]),
            Route("/v1/embeddings", embeddings.embeddings, methods=["POST"]),
            Route("/v1/models", info.models),
            Route("/v1/models/{id:path}", info.model),  # names have slashes
            Route("/tokenize", tokenization.tokenize, methods=["POST"]),
            Route("/detokenize", tokenization.detokenize, methods=["POST"]),
            Route("/version", info.version),
            Route("/metrics", info.metrics),
            Route(HEALTH, info.health),
            Route("/live", live.live),
            Route("/", page.index),
            Route("/page/{path:path}", page.file),
        ],
        middleware=[
            Middleware(EchoId),
            Middleware(HeaderLimit, limits),
            Middleware(TokenCheck, tokens),
        ],
        exception_handlers={HTTPException: refuse_route},
    )
    app.router.redirect_slashes = False  # a path that is not there is an error, for a POST too
    return app


class HeaderLimit:
    """h11 limits only what is still incomplete when it arrives."""

    def __init__(self, app: ASGIApp, limits: Limits):
        self._app, self._limit = app, limits.max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http":
            size = (
                len(scope["raw_path"])
                + len(scope["query_string"])
                + sum(len(k) + len(v) for k, v in scope["headers"])
            )
            if size > self._limit:
                problem = (
                    f"path and headers have {size} bytes; the limit is {self._limit} "
                    f"(--max-header-bytes)"
                )
                answer = refusal(HeadersTooLargeError(problem))
        await answer(scope, receive, send)


class TokenCheck:
    """Asks every request for its token, but health checks and for the page, which is the same
    everywhere.
    """

    def __init__(self, app: ASGIApp, tokens: BearerTokens):
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and scope["path"] != HEALTH and not is_page(scope["path"]):
            try:
                self._tokens.check(Headers(scope=scope).get("authorization"), admin=False)
            except JaxserveError as error:
                answer = refusal(error)
        await answer(scope, receive, send)
