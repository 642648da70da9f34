"""Bounds on requests, connections and buffers. Each of them is a flag of the server."""

from dataclasses import dataclass, field, fields

from jaxserve.config.flag_values import count_above_0, number_above_0
from jaxserve.config.option import flag, flag_of
from jaxserve.structure.grammars import Bounds

MEBI = 2**20


def _bound[T: float](default: T, what: str) -> T:
    """Declare a bound on what the text says, whose first word is its unit."""
    parse = count_above_0 if isinstance(default, int) else number_above_0
    text = f"most {what} (default: {_shown(default, what)})"
    return field(default=default, metadata=flag(text, metavar="N", parse=parse) | {"what": what})


def _shown(default: float, what: str) -> str:
    """Return a default with its unit, such as "8 MiB"."""
    if what.startswith("seconds "):
        return f"{default:g} s"
    if what.startswith("bytes "):
        unit, size = ("MiB", MEBI) if default >= MEBI else ("KiB", 2**10)
        return f"{default / size:g} {unit}"
    return str(default)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on everything that a client can make the server hold or do.

    Each bound has a finite default, so that a server without flags is bounded as well. Sizes are
    bytes, times seconds.
    """

    max_waiting_requests: int = _bound(1024, "requests that wait for their first token")
    max_waiting_tokens: int = _bound(
        2**20, "prompt tokens of all requests that wait for their first token"
    )
    max_prompt_bytes: int = _bound(
        8 * MEBI, "bytes of text in a prompt or a conversation, before it is tokenized"
    )
    max_tools: int = _bound(128, "functions that the answer to a conversation may call")
    max_tool_bytes: int = _bound(
        256 * 1024, "bytes of the names, descriptions and schemas of a request's tools, as JSON"
    )
    max_grammar_bytes: int = _bound(
        64 * 1024, "bytes of a JSON schema, regular expression or grammar for structured output"
    )
    grammar_seconds: float = _bound(
        2.0, "seconds to compile a grammar in a process of its own, which is then killed"
    )
    grammar_cache_bytes: int = _bound(
        64 * MEBI,
        "bytes of grammars that passed and are kept, as they came and as they are compiled",
    )
    max_input_bytes: int = _bound(
        512 * MEBI, "bytes of all messages and bodies that are received or worked on together"
    )
    max_message_bytes: int = _bound(16 * MEBI, "bytes of a gRPC message, expanded if compressed")
    max_body_bytes: int = _bound(
        8 * MEBI, "bytes of an HTTP body: all other requests wait while its JSON is parsed"
    )
    max_header_bytes: int = _bound(
        16 * 1024, "bytes of a gRPC call's metadata, or of an HTTP request's headers"
    )
    max_http_connections: int = _bound(
        2048, "HTTP connections at a time, idle ones included; each waiting request needs one"
    )
    max_grpc_connections: int = _bound(
        1024, "gRPC connections at a time on each port, idle ones included"
    )
    max_streams_per_connection: int = _bound(1024, "calls at a time on one gRPC connection")
    max_unread_tokens: int = _bound(
        4096, "tokens of a stream that its client has not read before the stream is ended"
    )
    slow_client_seconds: float = _bound(
        30.0,
        "seconds for a client to send a whole request, or to read a message or 64 KiB of an answer",
    )
    keep_alive_seconds: float = _bound(
        75.0,
        "seconds that an HTTP connection stays open between two requests; a proxy before the "
        "server has to close it earlier",
    )
    max_request_seconds: float = _bound(3600.0, "seconds from a request's arrival to its end")
    max_stored_response_bytes: int = _bound(
        64 * MEBI, "bytes of responses that are kept for later requests to /v1/responses"
    )
    stored_response_seconds: float = _bound(
        3600.0, "seconds that such a response is kept, if others leave it room"
    )
    max_watchers: int = _bound(16, "readers of the live view at a time")

    @property
    def grammars(self) -> Bounds:
        """Bounds on the compilation of structured output."""
        return Bounds(self.max_grammar_bytes, self.grammar_seconds, self.grammar_cache_bytes)

    @classmethod
    def table(cls) -> list[tuple[str, float, str]]:
        """Return (flag, default, what it bounds) of each limit, for --help and docs/api.md."""
        return [(flag_of(f.name), f.default, f.metadata["what"]) for f in fields(cls)]  # type: ignore[misc]
