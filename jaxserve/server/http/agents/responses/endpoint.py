"""Serve /v1/responses and the paths below it."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import RequestError
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.service import new_id
from jaxserve.server.http.agents.listed import Notes, parsed
from jaxserve.server.http.agents.responses.listing import listing
from jaxserve.server.http.agents.responses.request import (
    EARLIER,
    NAMES,
    Question,
    encrypts,
    question_of,
    sampling_of,
)
from jaxserve.server.http.agents.responses.response import new_response
from jaxserve.server.http.agents.responses.store import NotStoredError, ResponseStore
from jaxserve.server.http.agents.responses.types import CountBody, InputBody, ResponsesBody
from jaxserve.server.http.agents.responses.writer import ResponseWriter
from jaxserve.server.http.agents.turns import MESSAGES, Turn, names_of_body, reply
from jaxserve.server.http.body import read_object, timeout_of
from jaxserve.server.http.calls import check_model
from jaxserve.server.http.errors import UnknownUrlError, errors_to_responses
from jaxserve.server.http.ignored import note_also
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
        # A server that takes no requests refuses before it reads the body.
        served = self._readiness.require_serving()
        began = time.monotonic()
        timeout = timeout_of(request)
        given = await read_object(request, self._limits)
        if timeout is not None:
            timeout -= time.monotonic() - began
        notes = _notes(served)
        body = parsed(ResponsesBody, given, notes)
        turn = self._turn(body, notes, served, request.state.token)
        turn = replace(turn, call=replace(turn.call, timeout=timeout))
        # Asked again, since the server may have ended while the body was read.
        return await reply(request, self._readiness.require_serving(), turn)

    @errors_to_responses
    async def input_tokens(self, request: Request) -> Response:
        """Count the tokens that the prompt of a request would have."""
        served = self._readiness.require_serving()
        given = await read_object(request, self._limits)
        notes = _notes(served)
        body = parsed(CountBody, given, notes)
        check_model(body.model, served)
        asked = self._question(body, notes, request.state.token)
        note_also(request, list(notes.fields))
        with names_of_body(NAMES, asked.conversation.paths):
            rendered = await served.service.tokenize(
                asked.conversation.messages, MESSAGES, tools=asked.offered, options=asked.options
            )
        note_also(request, [NAMES.get(name, name) for name in rendered.unread])
        count = len(rendered.token_ids)
        return _json({"object": "response.input_tokens", "input_tokens": count})

    def _turn(self, body: ResponsesBody, notes: Notes, served: ServingState, token: str) -> Turn:
        asked = self._question(body, notes, token)
        params = sampling_of(body, asked.structure, served.defaults)
        response = new_response(body, params, served.model.name)
        seal = self._seals.seal if encrypts(body, notes) else None

        def keep(response: Mapping[str, Any]) -> None:
            if body.store:
                self._store.put(response, asked.items, token)

        return Turn(
            call=IncomingRequest(
                prompt=asked.conversation.messages,
                prompt_field=MESSAGES,
                params=params,
                tools=asked.offered,
                options=asked.options,
                clamps_max_tokens=True,
                request_id=body.request_id or new_id(),
                priority=body.priority,
                cache_salt=body.cache_salt,
            ),
            model=body.model,
            new_writer=lambda: ResponseWriter(response, asked.tools.origins, seal, keep),
            stream=body.stream,
            names=NAMES,
            paths=asked.conversation.paths,
            notes=notes,
        )

    def _question(self, body: InputBody, notes: Notes, token: str) -> Question:
        earlier = list[Any]()
        if body.previous_response_id is not None:
            try:
                earlier = self._store.get(body.previous_response_id, token).conversation
            except NotStoredError as error:
                raise EarlierResponseError(EARLIER, f"cannot be gone on from: {error}") from None
        return question_of(body, earlier, self._limits, notes, self._seals)

    # ---- stored responses

    @errors_to_responses
    async def retrieve(self, request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            problem = "is true; a stored response is complete and comes at once (leave it out)"
            raise RequestError("stream", problem)
        stored = self._store.get(request.path_params["id"], request.state.token)
        return Response(stored.response, media_type=MEDIA_TYPE)

    @errors_to_responses
    async def delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        self._store.delete(id, request.state.token)
        return _json({"id": id, "object": "response", "deleted": True})

    @errors_to_responses
    async def input_items(self, request: Request) -> Response:
        stored = self._store.get(request.path_params["id"], request.state.token)
        return _json(listing(stored.conversation[: stored.inputs], request.query_params))

    # ---- what is not there

    @errors_to_responses
    async def upgrade(self, request: Request) -> Response:
        """Refuse a WebSocket, which Codex tries first."""
        raise UnknownUrlError("GET /v1/responses: WebSockets are not served; POST requests here")

    @errors_to_responses
    async def cancel(self, request: Request) -> Response:
        raise UnknownUrlError(
            "POST /v1/responses/ID/cancel: no response runs in the background; close the "
            "connection of one to end it"
        )

    @errors_to_responses
    async def compact(self, request: Request) -> Response:
        raise UnknownUrlError(
            "POST /v1/responses/compact: conversations are not compacted here; ask for a summary"
        )


def _notes(served: ServingState) -> Notes:
    return Notes(served.service.prompts.chat.unknown_fields)


def _json(value: Mapping[str, Any]) -> Response:
    return Response(dumps(value), media_type=MEDIA_TYPE)
