"""Fields of bodies that are accepted and change nothing, and the header that names them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.core.ignored_names import HEADER, listed, nameable

CACHE_HINT = "cache_control"  # of Anthropic's API: where a prefix that is shared ends
STATE = "ignored"  # of a request: names of its fields


def note_ignored(request: Request, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Remember which fields of a checked body the answer shall name as ignored.

    Args:
        given: The body as it came.
        known: Fields that its kind has.
    """
    setattr(request.state, STATE, [*_ignored(given, known)])


def note_also(request: Request, keys: Sequence[str]) -> None:
    """Remember keys of a client's own choice that the answer shall name as ignored."""
    noted = getattr(request.state, STATE, [])
    setattr(request.state, STATE, list(dict.fromkeys([*noted, *nameable(keys)])))


def _ignored(given: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[str]:
    yield from (name for name in given if name not in known and given[name] is not None)
    if given.get("stream_options") and not given.get("stream"):
        yield "stream_options"
    if given.get("top_logprobs") is not None and not given.get("logprobs"):
        yield "top_logprobs"
    hinted = (*_parts(given.get("messages")), *_tools(given.get("tools")))
    if any(CACHE_HINT in part for part in hinted):
        yield CACHE_HINT


def _parts(messages: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of the messages' contents."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if isinstance(part, Mapping))


def _tools(tools: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the tools, which were checked to be objects, and the functions in them."""
    for tool in tools if isinstance(tools, list) else ():
        yield tool
        function = tool.get("function")
        if isinstance(function, Mapping):
            yield function


class TellIgnored:
    """Names the fields of a request that changed nothing in a header of its answer."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def telling(message: Message) -> None:
            names = scope.get("state", {}).get(STATE)
            if message["type"] == "http.response.start" and names:
                MutableHeaders(scope=message)[HEADER] = listed(names)
            await send(message)

        await self._app(scope, receive, telling)
