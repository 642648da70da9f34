"""Requests as they arrive, whichever protocol they came by, before they are admitted."""

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jaxserve.chat import TemplateOptions, Tools
from jaxserve.chat.chat import NO_OPTIONS
from jaxserve.prompts import Prompt
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.core.ignored_names import IgnoredField

TRACE_HEADERS = ("traceparent", "tracestate")  # W3C Trace Context


@dataclass(frozen=True, kw_only=True)
class IncomingRequest:
    """A parsed request that was not checked or tokenized yet."""

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt_field: str = "prompt"  # path of the prompt in the client's message, for errors
    embed: bool = False  # the client wants the prompt's embedding instead of text
    prefill: bool = False  # a decode server asks for the prompt's KV pages only
    tools: Tools | None = None  # functions that the answer to a conversation may call
    options: TemplateOptions = NO_OPTIONS  # of such an answer
    # The client's program always asks for the same max_tokens: an answer may be as long as the
    # context leaves, which has to be --least-answer-tokens.
    clamps_max_tokens: bool = False
    ignored: tuple[IgnoredField, ...] = ()  # fields of the client's message that change nothing
    request_id: str = ""
    call_id: str = ""  # of the client's call, where several requests are one
    priority: int = 0
    client: str = ""  # who asks, see `BearerTokens.client_of`
    # May abort it, beside administrators: whoever gives Service.abort the same owner.
    owner: str = field(default="", repr=False)  # may have a token in it
    cache_salt: str = ""
    # Seconds from `arrived` until the client gives up; None: only --max-request-seconds applies.
    timeout: float | None = None
    trace: Mapping[str, str] = field(default_factory=dict)  # W3C headers of the request's trace
    arrived: float = field(default_factory=time.monotonic)  # on the monotonic clock

    @property
    def deadline(self) -> float | None:
        """Time on the monotonic clock at which the client gives up; None: never."""
        return None if self.timeout is None else self.arrived + self.timeout


def new_id() -> str:
    """Return a request id for a client that gave none."""
    return f"req-{secrets.token_hex(8)}"


def trace_of(headers: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Return the trace headers among gRPC metadata or HTTP headers; names are in lower case."""
    return {name: str(value) for name, value in headers if name in TRACE_HEADERS}
