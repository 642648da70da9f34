"""Call: a request as it comes through a door, whichever it is."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jaxserve.chat import Tools
from jaxserve.prompts import Prompt
from jaxserve.request import SamplingParams

TRACE_HEADERS = ("traceparent", "tracestate")  # W3C Trace Context


@dataclass(frozen=True, kw_only=True)
class IncomingRequest:
    """A request at the door. timeout: seconds that the client will wait from now; None: as long as
    the limits allow.

    prompt_field: the prompt's path in the client's message, for errors. embed: its embedding is
    wanted, and no text. prefill: it comes from a server that decodes, and only its prompt is to be
    computed. tools: that the answer to a conversation may call. trace: headers that say which trace
    the request belongs to.
    """

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt_field: str = "prompt"
    embed: bool = False
    prefill: bool = False
    tools: Tools | None = None
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None
    trace: Mapping[str, str] = field(default_factory=dict)
    arrived: float = field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float | None:
        """On the monotonic clock."""
        return None if self.timeout is None else self.arrived + self.timeout


def trace_of(headers: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Those of gRPC's metadata, or of HTTP's headers, that say which trace a request belongs to;
    names are small.
    """
    return {name: str(value) for name, value in headers if name in TRACE_HEADERS}
