"""Serve Anthropic's API: POST /v1/messages and /v1/messages/count_tokens.

The query, and the headers anthropic-version and anthropic-beta, have no effect.
"""

import time
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.chat import TemplateOptions, Tools
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.service import new_id
from jaxserve.server.http.agents.listed import Notes, parsed
from jaxserve.server.http.agents.messages.conversation import Conversation, conversation_of
from jaxserve.server.http.agents.messages.settings import (
    names_of,
    options_of,
    sampling_of,
    structure_of,
)
from jaxserve.server.http.agents.messages.tools import tools_in
from jaxserve.server.http.agents.messages.types import ConversationBody, CountBody, MessagesBody
from jaxserve.server.http.agents.messages.writer import Asked, MessageWriter
from jaxserve.server.http.agents.turns import MESSAGES, Turn, names_of_body, reply
from jaxserve.server.http.anthropic_errors import ID_HEADER
from jaxserve.server.http.body import read_object, timeout_of
from jaxserve.server.http.calls import check_model
from jaxserve.server.http.errors import errors_to_responses
from jaxserve.server.http.ignored import note_also
from jaxserve.server.http.json import MEDIA_TYPE, dumps
from jaxserve.server.http.replies import HEADER_SAFE
from jaxserve.server.readiness import Readiness
from jaxserve.server.security.seals import Seals
from jaxserve.server.serving_state import ServingState


class Asking(NamedTuple):
    """Parts of a body that the prompt is made of."""

    conversation: Conversation
    tools: Tools | None
    options: TemplateOptions


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
        # A server that takes no requests refuses before it reads the body.
        state = self._readiness.require_serving()
        timeout = timeout_of(request)
        began = time.monotonic()
        given = await read_object(request, self._limits)
        if timeout is not None:
            timeout -= time.monotonic() - began
        turn = self._turn(given, timeout, state)
        # Asked again, since the server may have ended while the body was read.
        return await reply(request, self._readiness.require_serving(), turn)

    @errors_to_responses
    async def count_tokens(self, request: Request) -> Response:
        state = self._readiness.require_loaded()
        given = await read_object(request, self._limits)
        notes = _notes(state)
        body = parsed(CountBody, given, notes)
        check_model(body.model, state)
        asking = self._asking(body, notes, answered=False)
        structure_of(body, notes)  # which is checked, and not in the prompt
        note_also(request, list(notes.fields))
        conversation, tools, options = asking
        with names_of_body(names_of(body), conversation.paths):
            rendered = await state.service.tokenize(
                conversation.messages, MESSAGES, tools=tools, options=options
            )
        note_also(request, [names_of(body).get(name, name) for name in rendered.unread])
        return Response(dumps({"input_tokens": len(rendered.token_ids)}), media_type=MEDIA_TYPE)

    def _turn(self, given: dict[str, Any], timeout: float | None, state: ServingState) -> Turn:
        notes = _notes(state)
        body = parsed(MessagesBody, given, notes)
        conversation, tools, options = self._asking(body, notes, answered=True)
        id = body.request_id or new_id()
        call = IncomingRequest(
            prompt=conversation.messages,
            prompt_field=MESSAGES,
            params=sampling_of(body, state.defaults, notes),
            tools=tools,
            options=options,
            clamps_max_tokens=True,
            request_id=id,
            priority=body.priority,
            cache_salt=body.cache_salt,
            timeout=timeout,
        )
        omits = body.thinking is not None and body.thinking.display == "omitted"
        asked = Asked(id, state.model.name, body.max_tokens, omits)
        return Turn(
            call=call,
            model=body.model,
            new_writer=partial(MessageWriter, asked, self._seals),
            stream=body.stream,
            names=names_of(body),
            paths=conversation.paths,
            notes=notes,
            headers={ID_HEADER: id} if HEADER_SAFE.fullmatch(id) else {},
        )

    def _asking(self, body: ConversationBody, notes: Notes, answered: bool) -> Asking:
        conversation = conversation_of(body, self._seals, notes, answered)
        tools = tools_in(body, self._limits, notes)
        return Asking(conversation, tools, options_of(body, notes))


def _notes(state: ServingState) -> Notes:
    return Notes(state.service.prompts.chat.unknown_fields)
