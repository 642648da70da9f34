"""x-request-id: what a log can be searched for."""

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
WRITABLE = re.compile("[!-~]+")  # in a header


def id_header(request_id: str) -> dict[str, str]:
    """The header with the request's id, if one can be written so."""
    return {HEADER: request_id} if WRITABLE.fullmatch(request_id) else {}


class EchoId:
    """Answers every request that has an x-request-id with the same."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(HEADER) if scope["type"] == "http" else None

        async def echoing(message: Message) -> None:
            if message["type"] == "http.response.start" and given is not None:
                MutableHeaders(scope=message)[HEADER] = given
            await send(message)

        await self._app(scope, receive, echoing)
