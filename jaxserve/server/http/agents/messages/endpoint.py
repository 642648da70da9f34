"""Serve Anthropic's API: POST /v1/messages and /v1/messages/count_tokens.

The query, and the headers anthropic-version and anthropic-beta, have no effect.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.core.incoming_request import IncomingRequest, new_id
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.agents.listed import Notes
from jaxserve.server.http.agents.messages.conversation import conversation_of
from jaxserve.server.http.agents.messages.settings import (
    names_of,
    options_of,
    params_of,
    structure_of,
)
from jaxserve.server.http.agents.messages.tools import tools_in
from jaxserve.server.http.agents.messages.types import ConversationBody, CountBody, MessagesBody
from jaxserve.server.http.agents.messages.writer import Asked, MessageWriter
from jaxserve.server.http.agents.reading import ReadRequest, read_listed
from jaxserve.server.http.agents.turns import MESSAGES, Turn, count_tokens, reply
from jaxserve.server.http.anthropic_errors import ID_HEADER
from jaxserve.server.http.errors import errors_to_responses
from jaxserve.server.http.json import MEDIA_TYPE, dumps
from jaxserve.server.http.replies import HEADER_SAFE
from jaxserve.server.readiness import Readiness
from jaxserve.server.security.seals import Seals
from jaxserve.server.serving_state import ServingState


class Messages:
    """Endpoints of Anthropic's API.

    Args:
        seals: Seals of the thoughts that clients keep.
    """

    def __init__(self, readiness: Readiness, limits: Limits, seals: Seals):
        self._readiness = readiness
        self._limits = limits
        self._seals = seals

    @errors_to_responses
    async def messages(self, request: Request) -> Response:
        """Answer a conversation."""
        # A server that takes no requests refuses before it reads the body.
        served = self._readiness.require_serving()
        read = await read_listed(request, MessagesBody, self._limits, served)
        turn = self._turn(read, served)
        # Asked again, since the server may have ended while the body was read.
        return await reply(request, self._readiness.require_serving(), turn)

    @errors_to_responses
    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a conversation."""
        served = self._readiness.require_loaded()
        read = await read_listed(request, CountBody, self._limits, served)
        body = read.body
        paths, call = self._call(body, read.notes, answered=False)
        structure_of(body, read.notes)  # which is checked, and not in the prompt
        tokens = await count_tokens(
            request, served, call, body.model, names_of(body), paths, read.notes
        )
        headers = {ID_HEADER: new_id()}
        return Response(dumps({"input_tokens": tokens}), headers=headers, media_type=MEDIA_TYPE)

    def _turn(self, read: ReadRequest[MessagesBody], served: ServingState) -> Turn:
        body = read.body
        paths, call = self._call(body, read.notes, answered=True)
        id = body.request_id or new_id()
        call = replace(
            call,
            params=params_of(body, served.defaults, read.notes),
            clamps_max_tokens=True,
            request_id=id,
            priority=body.priority,
            cache_salt=body.cache_salt,
            timeout=read.timeout,
        )
        omits = body.thinking is not None and body.thinking.display == "omitted"
        asked = Asked(id, served.model.name, body.max_tokens, omits)
        return Turn(
            call=call,
            model=body.model,
            new_writer=partial(MessageWriter, asked, self._seals),
            stream=body.stream,
            names=names_of(body),
            paths=paths,
            notes=read.notes,
            headers={ID_HEADER: id} if HEADER_SAFE.fullmatch(id) else {},
        )

    def _call(
        self, body: ConversationBody, notes: Notes, answered: bool
    ) -> tuple[Sequence[str], IncomingRequest]:
        """Return what the prompt is made of, and the path of each message of it."""
        conversation = conversation_of(body, self._seals, notes, answered)
        call = IncomingRequest(
            prompt=conversation.messages,
            prompt_field=MESSAGES,
            tools=tools_in(body, self._limits, notes),
            options=options_of(body, notes),
        )
        return conversation.paths, call
