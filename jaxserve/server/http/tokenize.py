"""POST /tokenize and /detokenize, as vLLM has them."""

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import RequestError
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.body import MEDIA_TYPE, read
from jaxserve.server.http.calls import check_model, conversation
from jaxserve.server.http.errors import answering
from jaxserve.server.http.json import dumps
from jaxserve.server.http.types import DetokenizeBody, TokenizeBody
from jaxserve.server.readiness import Readiness


class Tokenization:
    def __init__(self, readiness: Readiness, limits: Limits):
        self._readiness, self._limits = readiness, limits

    @answering
    async def tokenize(self, request: Request) -> Response:
        served = self._readiness.require_loaded()
        body = await read(request, TokenizeBody, self._limits)
        check_model(body.model, served)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("prompt", "is missing; give either prompt or messages")
        if body.messages is None:
            rendered = await served.service.tokenize(body.prompt or "", "prompt")
        else:
            rendered = await served.service.tokenize(conversation(body.messages), "messages")
        ids = list(rendered.token_ids)
        found = {"tokens": ids, "count": len(ids), "max_model_len": served.model.max_context}
        return Response(dumps(found), media_type=MEDIA_TYPE)

    @answering
    async def detokenize(self, request: Request) -> Response:
        served = self._readiness.require_loaded()
        body = await read(request, DetokenizeBody, self._limits)
        check_model(body.model, served)
        text = await served.service.detokenize(body.tokens, "tokens")
        return Response(dumps({"prompt": text}), media_type=MEDIA_TYPE)
