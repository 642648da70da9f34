"""OpenTelemetry traces: a span for every request, made when it has ended. Prompts and completions
are never in them.

Names are those of the semantic conventions for generative AI, where they have one: gen_ai.* of
spans, and gen_ai.server.* of metrics for the two times that they measure. The rest are jaxserve.*;
times are seconds.
"""

import os
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from jaxserve.completion import Timings
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.prompts import is_conversation
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.engine_thread import StepReport
from jaxserve.server.core.incoming_request import IncomingRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

EXPORTERS = {  # by OTEL_EXPORTER_OTLP_PROTOCOL
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}


def open_provider() -> "TracerProvider":
    """Spans go to a collector over OTLP, as the OTEL_* variables say; close it with shutdown().

    ConfigError when OpenTelemetry is not installed, or a variable asks for another way.
    """
    protocol = _asked("PROTOCOL", "grpc", EXPORTERS)
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = import_module(EXPORTERS[protocol]).OTLPSpanExporter()
    except ImportError as error:
        raise ConfigError(
            f"--otel needs OpenTelemetry: {error} (pip install 'jaxserve[otel]')"
        ) from None
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _asked(name: str, default: str, known: Mapping[str, object]) -> str:
    """The exporter's variable for traces, or for everything."""
    for variable in (f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}"):
        if value := os.environ.get(variable):
            if value not in known:
                raise ConfigError(f"{variable} is {value!r}; --otel knows {' and '.join(known)}")
            return value
    return default


class Traces:
    """An observer of the service. model: the name that clients know."""

    def __init__(self, provider: "TracerProvider", model: str):
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("jaxserve", version("jaxserve"))
        self._parent = TraceContextTextMapPropagator().extract
        self._kind, self._model = SpanKind.SERVER, model
        self._failed = lambda reason: Status(StatusCode.ERROR, reason)

    def refused(self, call: IncomingRequest, error: JaxserveError) -> None:
        self._tell(call, error, {})

    def stepped(self, news: StepReport) -> None:
        pass

    def received(self, answer: Answer, tokens: int, first: bool, seconds: float) -> None:
        pass

    def ended(self, answer: Answer, error: JaxserveError | None) -> None:
        self._tell(answer.incoming, error, dict(_outcome(answer, error)))

    def _tell(
        self, call: IncomingRequest, error: JaxserveError | None, outcome: Mapping[str, Any]
    ) -> None:
        operation, ended = _operation(call), time.time_ns()
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._parent(call.trace),
            kind=self._kind,
            start_time=ended - round((time.monotonic() - call.arrived) * 1e9),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "jaxserve",
                "gen_ai.request.model": self._model,
            },
        )
        if span.is_recording():
            span.set_attributes({**dict(_asked_for(call)), **outcome})
            if error:
                span.set_attribute("error.type", error.reason)
                span.set_status(
                    self._failed(error.reason)
                )  # the message may have words of the prompt
        span.end(ended)


def _operation(call: IncomingRequest) -> str:
    if call.embed:
        return "embeddings"
    return "chat" if is_conversation(call.prompt) else "text_completion"


def _asked_for(call: IncomingRequest) -> Iterator[tuple[str, Any]]:
    params = call.params
    if call.embed:
        return
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    if params.top_k:
        yield "gen_ai.request.top_k", params.top_k
    if params.max_tokens is not None:
        yield "gen_ai.request.max_tokens", params.max_tokens
    if params.n > 1:
        yield "gen_ai.request.choice.count", params.n


def _outcome(answer: Answer, error: JaxserveError | None) -> Iterator[tuple[str, Any]]:
    yield "gen_ai.response.id", answer.id
    yield "gen_ai.usage.input_tokens", answer.prompt_tokens
    completions = answer.completions
    if len(completions) < answer.prepared.request.params.n:
        if error is None:
            yield "jaxserve.cancelled", True
        return
    yield "gen_ai.usage.output_tokens", sum(len(completion.token_ids) for completion in completions)
    yield "gen_ai.usage.cache_read.input_tokens", completions[0].timings.cached_tokens
    yield "gen_ai.response.finish_reasons", [completion.finish_reason for completion in completions]
    yield from _times(completions[0].timings)


def _times(timings: Timings) -> Iterator[tuple[str, Any]]:
    """Of the first choice."""
    yield "jaxserve.queue_seconds", timings.queue
    if timings.ttft:
        yield "gen_ai.server.time_to_first_token", timings.ttft
        yield "jaxserve.prefill_seconds", max(0.0, timings.ttft - timings.queue)
        yield "jaxserve.decode_seconds", timings.total - timings.ttft
    if timings.tpot:
        yield "gen_ai.server.time_per_output_token", timings.tpot
    yield "jaxserve.preemptions", timings.preemptions
