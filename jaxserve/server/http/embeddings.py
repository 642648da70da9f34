"""Serve POST /v1/embeddings in OpenAI's form."""

import struct
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.completion import Completion
from jaxserve.errors import RequestError
from jaxserve.server.core.embedding import embed, embedding_requests, render_each
from jaxserve.server.core.incoming_request import IncomingRequest, new_id, trace_of
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.body import read_with_timeout
from jaxserve.server.http.calls import check_model
from jaxserve.server.http.errors import errors_to_responses
from jaxserve.server.http.json import MEDIA_TYPE, dumps
from jaxserve.server.http.replies import id_header
from jaxserve.server.http.streams import while_connected
from jaxserve.server.http.types import EmbeddingBody
from jaxserve.server.readiness import Readiness
from jaxserve.server.serving_state import ServingState


class Embeddings:
    """Endpoint that computes embeddings."""

    def __init__(self, readiness: Readiness, limits: Limits):
        self._readiness = readiness
        self._limits = limits

    @errors_to_responses
    async def embeddings(self, request: Request) -> Response:
        # A server that takes no requests refuses before it reads the body.
        self._readiness.require_serving()
        body, timeout = await read_with_timeout(request, EmbeddingBody, self._limits)
        id = body.request_id or new_id()
        # Asked again, since the server may have ended while the body was read.
        served = self._readiness.require_serving()
        check_model(body.model, served)
        calls = _calls(
            body,
            id,
            client=request.state.client,
            timeout=timeout,
            trace=trace_of(request.headers.items()),
        )
        _check_dimensions(body, served)
        done = await while_connected(request, embed(served.service, calls))
        content = await _content(body, served, done)
        return Response(content, headers=id_header(id), media_type=MEDIA_TYPE)


def _calls(body: EmbeddingBody, id: str, **given: Any) -> list[IncomingRequest]:
    """Return one call for each input; `given` has more fields of Call."""
    alone = len(body.input) == 1
    inputs = [(prompt, "input" if alone else f"input[{i}]") for i, prompt in enumerate(body.input)]
    return embedding_requests(
        inputs, id, priority=body.priority, cache_salt=body.cache_salt, **given
    )


def _check_dimensions(body: EmbeddingBody, served: ServingState) -> None:
    dimensions = served.model.embedding_dimensions
    if dimensions and body.dimensions not in (None, dimensions):
        problem = (
            f"is {body.dimensions}; embeddings of this model have {dimensions}, and are not cut "
            f"(leave it out)"
        )
        raise RequestError("dimensions", problem)


async def _content(body: EmbeddingBody, served: ServingState, done: Sequence[Completion]) -> bytes:
    # Entry by entry: one call of dumps for all of them would hold the interpreter's lock, and with
    # it every other request, for the whole reply.
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
    """Encode the values as little-endian float32 in base64."""
    return b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
