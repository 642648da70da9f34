"""Serve /v1/responses and the paths below it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.chat.bounds import MAX_MESSAGES
from jaxserve.errors import RequestError
from jaxserve.server.core.incoming_request import IncomingRequest, new_id
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.agents.listed import Notes
from jaxserve.server.http.agents.reading import ReadRequest, read_listed
from jaxserve.server.http.agents.responses.listing import listing
from jaxserve.server.http.agents.responses.request import (
    EARLIER,
    NAMES,
    Question,
    encrypts,
    question_of,
)
from jaxserve.server.http.agents.responses.response import new_response
from jaxserve.server.http.agents.responses.store import NotStoredError, ResponseStore, Stored
from jaxserve.server.http.agents.responses.types import CountBody, InputBody, ResponsesBody
from jaxserve.server.http.agents.responses.writer import ResponseWriter
from jaxserve.server.http.agents.sampling import sampling_of
from jaxserve.server.http.agents.turns import MESSAGES, Turn, count_tokens, reply
from jaxserve.server.http.errors import UnknownUrlError, errors_to_responses
from jaxserve.server.http.json import MEDIA_TYPE, dumps
from jaxserve.server.readiness import Readiness
from jaxserve.server.security.seals import Seals
from jaxserve.server.serving_state import ServingState


class EarlierResponseError(RequestError):
    """The response that a request goes on from is not stored."""

    reason = "PREVIOUS_RESPONSE_NOT_FOUND"


class Responses:
    """Endpoints of responses.

    Args:
        seals: Seals of thoughts that clients keep encrypted.
    """

    def __init__(self, readiness: Readiness, limits: Limits, seals: Seals):
        self._readiness = readiness
        self._limits = limits
        self._seals = seals
        self._store = ResponseStore(
            limits.max_stored_response_bytes, limits.stored_response_seconds
        )

    # ---- answers

    @errors_to_responses
    async def create(self, request: Request) -> Response:
        """Answer a request."""
        # A server that takes no requests refuses before it reads the body.
        served = self._readiness.require_serving()
        read = await read_listed(request, ResponsesBody, self._limits, served)
        question = self._question(request, read.body, read.notes)
        turn = self._turn(request, read, question, served)
        # Asked again, since the server may have ended while the body was read.
        return await reply(request, self._readiness.require_serving(), turn)

    @errors_to_responses
    async def input_tokens(self, request: Request) -> Response:
        """Count the tokens that the prompt of a request would have."""
        served = self._readiness.require_loaded()
        read = await read_listed(request, CountBody, self._limits, served)
        question = self._question(request, read.body, read.notes)
        call = IncomingRequest(
            prompt=question.conversation.messages, tools=question.tools, options=question.options
        )
        count = await count_tokens(
            request, served, call, read.body.model, NAMES, question.conversation.paths, read.notes
        )
        return _json({"object": "response.input_tokens", "input_tokens": count})

    def _turn(
        self,
        request: Request,
        read: ReadRequest[ResponsesBody],
        question: Question,
        served: ServingState,
    ) -> Turn:
        body = read.body
        params = sampling_of(
            body,
            served.defaults,
            NAMES,
            max_tokens=body.max_output_tokens,
            structure=question.structure,
        )
        new_writer = partial(
            ResponseWriter,
            new_response(body, params, served.model.name),
            question.request_tools.origins,
            self._seals.seal if encrypts(body, read.notes) else None,
            self._keeper(body, question, request.state.token),
        )
        call = IncomingRequest(
            prompt=question.conversation.messages,
            prompt_field=MESSAGES,
            params=params,
            tools=question.tools,
            options=question.options,
            clamps_max_tokens=True,
            request_id=body.request_id or new_id(),
            priority=body.priority,
            cache_salt=body.cache_salt,
            timeout=read.timeout,
        )
        return Turn(
            call=call,
            model=body.model,
            new_writer=new_writer,
            stream=body.stream,
            names=NAMES,
            paths=question.conversation.paths,
            notes=read.notes,
        )

    def _keeper(
        self, body: ResponsesBody, question: Question, token: str
    ) -> Callable[[Mapping[str, Any]], None]:
        """Return the function that takes a response at its end."""
        if not body.store:
            return lambda response: None
        return partial(self._store.put, inputs=question.items, token=token)

    def _question(self, request: Request, body: InputBody, notes: Notes) -> Question:
        id = body.previous_response_id
        earlier = None if id is None else self._earlier(request, id)
        return question_of(body, earlier, self._limits, notes, self._seals)

    def _earlier(self, request: Request, id: str) -> Stored:
        """Return the response that a request goes on from, which counts as a part of its body."""
        try:
            stored = self._store.get(id, request.state.token)
        except NotStoredError as error:
            raise EarlierResponseError(EARLIER, f"cannot be gone on from: {error}") from None
        size = stored.conversation_size
        limit = self._limits.max_body_bytes
        if size > limit or len(stored.items) > MAX_MESSAGES:
            problem = (
                f"has {len(stored.items)} items of {size} bytes; the limits are {MAX_MESSAGES} and "
                f"{limit} (--max-body-bytes)"
            )
            raise RequestError(EARLIER, problem)
        request.state.input_bytes.add(size)
        return stored

    # ---- stored responses

    @errors_to_responses
    async def retrieve(self, request: Request) -> Response:
        """Return a stored response."""
        if request.query_params.get("stream") == "true":
            problem = "is true; a stored response is complete and comes at once (leave it out)"
            raise RequestError("stream", problem)
        stored = self._store.get(request.path_params["id"], request.state.token)
        return Response(stored.response, media_type=MEDIA_TYPE)

    @errors_to_responses
    async def delete(self, request: Request) -> Response:
        """Drop a stored response."""
        id = request.path_params["id"]
        self._store.delete(id, request.state.token)
        return _json({"id": id, "object": "response", "deleted": True})

    @errors_to_responses
    async def input_items(self, request: Request) -> Response:
        """List the input of a stored response."""
        stored = self._store.get(request.path_params["id"], request.state.token)
        return _json(listing(stored.input_items(), request.query_params))

    # ---- what is not there

    @errors_to_responses
    async def upgrade(self, request: Request) -> Response:
        """Refuse a WebSocket, which Codex tries first."""
        raise UnknownUrlError("GET /v1/responses: WebSockets are not served; POST requests here")

    @errors_to_responses
    async def cancel(self, request: Request) -> Response:
        """Refuse to end a response by its id."""
        raise UnknownUrlError(
            "POST /v1/responses/ID/cancel: no response runs in the background; close the "
            "connection of one to end it"
        )

    @errors_to_responses
    async def compact(self, request: Request) -> Response:
        """Refuse to compact a conversation."""
        raise UnknownUrlError(
            "POST /v1/responses/compact: conversations are not compacted here; ask for a summary"
        )


def _json(value: Mapping[str, Any]) -> Response:
    return Response(dumps(value), media_type=MEDIA_TYPE)
