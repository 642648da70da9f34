"""POST /v1/embeddings, as OpenAI has it."""

import struct
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.completion import Completion
from jaxserve.errors import RequestError
from jaxserve.server.core.embedding import embed, embedding_requests, render_each
from jaxserve.server.core.incoming_request import IncomingRequest, trace_of
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.service import new_id
from jaxserve.server.http.body import MEDIA_TYPE
from jaxserve.server.http.calls import body_of, check_model
from jaxserve.server.http.errors import answering
from jaxserve.server.http.ids import id_header
from jaxserve.server.http.json import dumps
from jaxserve.server.http.multiplex import while_connected
from jaxserve.server.http.types import EmbeddingBody
from jaxserve.server.readiness import Readiness
from jaxserve.server.serving_state import ServingState


class Embeddings:
    def __init__(self, readiness: Readiness, limits: Limits):
        self._readiness, self._limits = readiness, limits

    @answering
    async def embeddings(self, request: Request) -> Response:
        self._readiness.require_ready()
        body, timeout = await body_of(request, EmbeddingBody, self._limits)
        id = body.request_id or new_id()
        served = self._readiness.require_ready()  # the body may have taken its time
        check_model(body.model, served)
        calls = _calls(body, id, timeout=timeout, trace=trace_of(request.headers.items()))
        _check_dimensions(body, served)
        done = await while_connected(request, embed(served.service, calls))
        return Response(
            await _content(body, served, done), headers=id_header(id), media_type=MEDIA_TYPE
        )


def _calls(body: EmbeddingBody, id: str, **given: Any) -> list[IncomingRequest]:
    """One for each input. given: more fields of Call."""
    alone = len(body.input) == 1
    inputs = [(prompt, "input" if alone else f"input[{i}]") for i, prompt in enumerate(body.input)]
    return embedding_requests(
        inputs, id, priority=body.priority, cache_salt=body.cache_salt, **given
    )


def _check_dimensions(body: EmbeddingBody, served: ServingState) -> None:
    made = served.model.embedding_dimensions
    if made and body.dimensions not in (None, made):
        problem = (
            f"is {body.dimensions}; embeddings of this model have {made}, and are not cut "
            f"(leave it out)"
        )
        raise RequestError("dimensions", problem)


async def _content(body: EmbeddingBody, served: ServingState, done: Sequence[Completion]) -> bytes:
    """Entry by entry: one call for all would keep everybody else from the interpreter."""

    def entry(index: int, completion: Completion) -> bytes:
        values = completion.embedding or ()
        form = _base64(values) if body.encoding_format == "base64" else list(values)
        return dumps({"object": "embedding", "index": index, "embedding": form})

    entries = await render_each(served.service, done, entry)
    tokens = sum(len(completion.prompt_token_ids) for completion in done)
    rest = dumps(
        {"model": served.model.name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    )
    return b'{"object":"list","data":[' + b",".join(entries) + b"]," + rest[1:]


def _base64(values: Sequence[float]) -> str:
    """Of float32, the lower bytes first."""
    return b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
