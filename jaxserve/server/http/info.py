"""What can be asked of the server itself: models, health, metrics, version."""

import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.http.body import MEDIA_TYPE
from jaxserve.server.http.calls import check_model
from jaxserve.server.http.errors import answering
from jaxserve.server.http.json import dumps
from jaxserve.server.readiness import Phase, Readiness
from jaxserve.server.serving_state import ModelCard

PROMETHEUS = "text/plain; version=0.0.4"


class Info:
    """metrics: renders Prometheus's text format."""

    def __init__(self, readiness: Readiness, metrics: Callable[[], Awaitable[bytes]]):
        self._readiness, self._metrics = readiness, metrics
        self._created, self._version = int(time.time()), version("jaxserve")

    @answering
    async def models(self, request: Request) -> Response:
        return _json(
            {"object": "list", "data": [self._card(self._readiness.require_loaded().model)]}
        )

    @answering
    async def model(self, request: Request) -> Response:
        served = self._readiness.require_loaded()
        check_model(request.path_params["id"], served)
        return _json(self._card(served.model))

    @answering
    async def health(self, request: Request) -> Response:
        phase = self._readiness.phase
        return _json({"status": str(phase)}, 200 if phase is Phase.READY else 503)

    @answering
    async def metrics(self, request: Request) -> Response:
        return Response(await self._metrics(), media_type=PROMETHEUS)

    @answering
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
