"""What HTTP clients write: paths and methods, headers, and the fields of bodies."""

import json
from collections.abc import Awaitable, Iterator, Mapping
from typing import Any, get_args, get_type_hints

from pydantic.fields import FieldInfo
from starlette.routing import Route

from jaxserve.chat.tools import AUTO, NONE, REQUIRED
from jaxserve.errors import CredentialError, QueueFullError
from jaxserve.server.core.incoming_request import TRACE_HEADERS
from jaxserve.server.core.limits import Limits
from jaxserve.server.http import chat_fields, response_format, types
from jaxserve.server.http.agents.listed import Listed
from jaxserve.server.http.agents.messages import types as of_messages
from jaxserve.server.http.agents.messages.types import MessagesBody
from jaxserve.server.http.agents.responses import types as of_responses
from jaxserve.server.http.agents.responses.types import ResponsesBody
from jaxserve.server.http.app import new_app
from jaxserve.server.http.body import TIMEOUT
from jaxserve.server.http.errors import error_response
from jaxserve.server.http.replies import ID_HEADER
from jaxserve.server.readiness import Readiness
from jaxserve.server.security.auth import BearerTokens
from tests.public_names import shown

BODIES: Mapping[str, type[types.Body]] = {
    "/detokenize": types.DetokenizeBody,
    "/tokenize": types.TokenizeBody,
    "/v1/chat/completions": types.ChatBody,
    "/v1/completions": types.CompletionBody,
    "/v1/embeddings": types.EmbeddingBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": of_messages.CountBody,
    "/v1/responses": ResponsesBody,
    "/v1/responses/input_tokens": of_responses.CountBody,
}
# They say that there is nothing, whatever the body.
REFUSED = ("/v1/responses/compact", "/v1/responses/{id}/cancel")
NO_MODEL = "has no model in BODIES"
OF_ANY_SERVER = {"content-length", "content-type"}
API_KEY = "x-api-key"  # read by `server.http.checks`
AUTHORIZATION = "authorization"  # read by `server.http.app` and `server.grpc.server`


def routes() -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for route in _routes():
        found.setdefault(route.path, set()).update(route.methods or ())
    return {path: " ".join(sorted(methods)) for path, methods in found.items()}


def _routes() -> list[Route]:
    def no_metrics() -> Awaitable[bytes]:
        raise AssertionError("nobody asks")

    app = new_app(Readiness(), BearerTokens(), Limits(), no_metrics)
    found = [route for route in app.routes if isinstance(route, Route)]
    assert len(found) == len(app.routes), "paths of other kinds of routes have to be listed too"
    return found


def headers() -> dict[str, str]:
    """Headers of requests that the server reads, and those that refusals add."""
    read = (AUTHORIZATION, API_KEY, ID_HEADER, TIMEOUT, *TRACE_HEADERS)
    sent = dict.fromkeys(read, "of a request")
    refusals = error_response(CredentialError("")), error_response(QueueFullError("", 1.0))
    added = {name for answer in refusals for name in answer.headers} - OF_ANY_SERVER
    return sent | dict.fromkeys(added, "of a refusal")


def fields() -> dict[str, str]:
    posted = [route.path for route in _routes() if "POST" in (route.methods or ())]
    found = {path: NO_MODEL for path in posted if path not in (*BODIES, *REFUSED)}
    for path, body in BODIES.items():
        if path not in posted:
            continue
        found |= {f"{path} {name}": what for name, what in _fields(body)}
        parts = (*_parts_of_tools(body), *_parts_of_formats(body))
        found |= {f"{path} {name}": "is taken" for name in parts}
    return found


def _fields(body: type[types.Body], outer: str = "") -> Iterator[tuple[str, str]]:
    """Fields that count, those of objects in them, and those that are accepted without effect."""
    hints = get_type_hints(body)
    for name, field in body.model_fields.items():
        yield outer + name, _field(hints[name], field)
        for kind in get_args(hints[name]):
            if isinstance(kind, type) and issubclass(kind, types.Body):
                yield from _fields(kind, f"{outer}{name}.")
    for name in body.ignored:
        yield outer + name, "is ignored"
    refused = body.refused if issubclass(body, Listed) else {}
    for name in body.only.keys() - body.model_fields.keys() - body.ignored.keys() | refused.keys():
        allowed = map(json.dumps, (*body.only.get(name, ()), None))
        yield outer + name, f"only {' or '.join(allowed)}"


def _field(hint: Any, field: FieldInfo) -> str:
    kind = shown.annotation(hint)
    if field.is_required():
        return f"{kind}, required"
    return kind if field.default is None else f"{kind}, default {shown.value(field.default)}"


def _parts_of_tools(body: type[types.Body]) -> Iterator[str]:
    """Parts of `tools` and `tool_choice`, which pydantic sees as plain dictionaries."""
    if "tools" not in body.model_fields or issubclass(body, Listed):
        return
    yield from (f"tools[].function.{name}" for name in chat_fields.FIELDS)
    if "tool_choice" in body.model_fields:
        yield from (f"tool_choice = {word}" for word in (AUTO, NONE, REQUIRED))


def _parts_of_formats(body: type[types.Body]) -> Iterator[str]:
    """Parts of `response_format`, which pydantic sees as a plain dictionary."""
    if response_format.FIELD not in body.model_fields:
        return
    for kind, member in response_format.TYPES.items():
        yield f"response_format.type = {kind}"
        if member:
            yield f"response_format.{member}"
    yield from (f"response_format.json_schema.{name}" for name in response_format.SCHEMA_FIELDS)
