"""Serve questions that the engine has no part in: models, health, metrics and version."""

import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.http.calls import check_model
from jaxserve.server.http.errors import errors_to_responses
from jaxserve.server.http.json import MEDIA_TYPE, dumps
from jaxserve.server.readiness import Phase, Readiness
from jaxserve.server.serving_state import ModelCard

PROMETHEUS = "text/plain; version=0.0.4"


class Info:
    """Endpoints about the server; `metrics` renders Prometheus's text format."""

    def __init__(self, readiness: Readiness, metrics: Callable[[], Awaitable[bytes]]):
        self._readiness = readiness
        self._metrics = metrics
        self._created = int(time.time())
        self._version = version("jaxserve")

    @errors_to_responses
    async def models(self, request: Request) -> Response:
        card = self._card(self._readiness.require_loaded().model)
        return _json({"object": "list", "data": [card]})

    @errors_to_responses
    async def model(self, request: Request) -> Response:
        served = self._readiness.require_loaded()
        check_model(request.path_params["id"], served)
        return _json(self._card(served.model))

    @errors_to_responses
    async def health(self, request: Request) -> Response:
        phase = self._readiness.phase
        return _json({"status": str(phase)}, 200 if phase is Phase.READY else 503)

    @errors_to_responses
    async def metrics(self, request: Request) -> Response:
        return Response(await self._metrics(), media_type=PROMETHEUS)

    @errors_to_responses
    async def version(self, request: Request) -> Response:
        return _json({"version": self._version})

    def _card(self, model: ModelCard) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxserve",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_context,
            "has_chat_template": model.has_chat_template,
            "embedding_dimensions": model.embedding_dimensions,
        }


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(dumps(value), status, media_type=MEDIA_TYPE)
