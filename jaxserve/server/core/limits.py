"""The bounds that hold before a request is looked at, and while it is served. Each is a flag."""

from dataclasses import dataclass, field, fields

from jaxserve.structure.grammars import Bounds

MEBI = 2**20


def _bound[T: float](default: T, what: str) -> T:
    return field(default=default, metadata={"what": what})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Defaults on purpose for everything: nothing of a client's is unbounded. Sizes are bytes,
    times seconds.
    """

    max_waiting_requests: int = _bound(1024, "requests that wait for their first token")
    max_waiting_tokens: int = _bound(
        2**20, "prompt tokens of requests that wait for their first token"
    )
    max_prompt_bytes: int = _bound(
        8 * MEBI, "text of a prompt, or of a conversation, before it is tokenized"
    )
    max_tools: int = _bound(128, "functions that a conversation's answer may call")
    max_tool_bytes: int = _bound(256 * 1024, "their names, descriptions and schemas, as JSON")
    max_grammar_bytes: int = _bound(
        64 * 1024, "a JSON schema, regular expression or grammar that a text has to follow"
    )
    grammar_seconds: float = _bound(2.0, "to compile one, in a process of its own")
    grammar_cache_bytes: int = _bound(
        64 * MEBI, "compiled grammars that are kept, as estimated from their size"
    )
    max_message_bytes: int = _bound(32 * MEBI, "a gRPC message")
    max_body_bytes: int = _bound(
        8 * MEBI, "an HTTP body: JSON takes long to read, and nobody else runs meanwhile"
    )
    max_header_bytes: int = _bound(16 * 1024, "metadata of a call, headers of an HTTP request")
    max_http_connections: int = _bound(1024, "HTTP connections at a time")
    max_streams_per_connection: int = _bound(1024, "calls at a time on one gRPC connection")
    max_unread_tokens: int = _bound(4096, "tokens made for a stream that its client has not read")
    slow_client_seconds: float = _bound(
        30.0, "for a client to read a message of a stream, to send headers, or a body"
    )
    max_request_seconds: float = _bound(3600.0, "age of a request")
    max_watchers: int = _bound(16, "readers of the live view at a time")

    @property
    def grammars(self) -> Bounds:
        return Bounds(self.max_grammar_bytes, self.grammar_seconds, self.grammar_cache_bytes)

    @classmethod
    def table(cls) -> list[tuple[str, float, str]]:
        """(flag, default, what it bounds), for --help and the documentation."""
        return [
            (f"--{f.name.replace('_', '-')}", f.default, f.metadata["what"]) for f in fields(cls)
        ]  # type: ignore[misc]
