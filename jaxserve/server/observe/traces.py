"""OpenTelemetry traces: one span for every request, made when it has ended.

Spans never contain prompts or completions. Attributes have the names of OpenTelemetry's semantic
conventions for generative AI where these define one: gen_ai.* of spans, and gen_ai.server.* of
metrics for the two times that those measure. All others are jaxserve.*. Times are seconds.
"""

import os
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from jaxserve.completion import Timings
from jaxserve.engine.engine_thread import StepReport
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.prompts import is_conversation
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.incoming_request import IncomingRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

EXPORTERS = {  # by OTEL_EXPORTER_OTLP_PROTOCOL
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
# Settings that name PEM files.
FILES = "CERTIFICATE CLIENT_CERTIFICATE CLIENT_KEY".split()


def open_provider() -> "TracerProvider":
    """Open an exporter of spans over OTLP as the OTEL_* variables configure it.

    Close it with shutdown(). Raises ConfigError when OpenTelemetry is not installed, or a variable
    asks for an unknown protocol, names a file that cannot be read, or has a value that
    OpenTelemetry refuses.
    """
    protocol = _protocol()
    for name in FILES:
        _check_file_of(name)
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = import_module(EXPORTERS[protocol]).OTLPSpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(exporter))
    except ImportError as error:
        raise ConfigError(
            f"--otel needs OpenTelemetry: {error} (pip install 'jaxserve[otel]')"
        ) from None
    except Exception as error:  # the packages have classes of their own for it
        raise ConfigError(
            f"--otel: a variable OTEL_* has a value of another form: {error}"
        ) from None
    return provider


def _variables(name: str) -> tuple[str, str]:
    """Return the variables of a setting; the one for traces precedes the one for all signals."""
    return f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}"


def _check_file_of(name: str) -> None:
    """Raise ConfigError if a setting names a file that cannot be read: it would be left out."""
    for variable in _variables(name):
        file = os.environ.get(variable)
        if file and not (os.path.isfile(file) and os.access(file, os.R_OK)):
            raise ConfigError(f"{variable} is {file}; it cannot be read (--otel)")


def _protocol() -> str:
    """Return the protocol of the exporter, one of EXPORTERS."""
    for variable in _variables("PROTOCOL"):
        if value := os.environ.get(variable):
            if value not in EXPORTERS:
                known = " and ".join(EXPORTERS)
                raise ConfigError(f"{variable} is {value!r}; --otel knows {known}")
            return value
    return "grpc"


class Traces:
    """Makes a span of every request that ended or was refused; a RequestObserver.

    Args:
        model: Name that clients use.
    """

    def __init__(self, provider: "TracerProvider", model: str):
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("jaxserve", version("jaxserve"))
        self._parent = TraceContextTextMapPropagator().extract
        self._kind = SpanKind.SERVER
        self._model = model
        self._failed = lambda reason: Status(StatusCode.ERROR, reason)

    def refused(self, incoming: IncomingRequest, error: JaxserveError) -> None:
        self._export(incoming, error, {})

    def stepped(self, report: StepReport) -> None:
        pass

    def received(self, answer: Answer, tokens: int, first: bool, seconds: float) -> None:
        pass

    def ended(self, answer: Answer, error: JaxserveError | None) -> None:
        self._export(answer.incoming, error, dict(_response_attributes(answer, error)))

    def _export(
        self, incoming: IncomingRequest, error: JaxserveError | None, outcome: Mapping[str, Any]
    ) -> None:
        operation = _operation(incoming)
        ended = time.time_ns()
        # Requests are timed on the monotonic clock, spans on the wall clock.
        age_ns = round((time.monotonic() - incoming.arrived) * 1e9)
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._parent(incoming.trace),
            kind=self._kind,
            start_time=ended - age_ns,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "jaxserve",
                "gen_ai.request.model": self._model,
            },
        )
        if span.is_recording():
            span.set_attributes({**dict(_request_attributes(incoming)), **outcome})
            if error:
                span.set_attribute("error.type", error.reason)
                # The reason and not the message, which may quote the prompt.
                span.set_status(self._failed(error.reason))
        span.end(ended)


def _operation(incoming: IncomingRequest) -> str:
    if incoming.embed:
        return "embeddings"
    return "chat" if is_conversation(incoming.prompt) else "text_completion"


def _request_attributes(incoming: IncomingRequest) -> Iterator[tuple[str, Any]]:
    if incoming.embed:
        return
    params = incoming.params
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    if params.top_k:
        yield "gen_ai.request.top_k", params.top_k
    if params.max_tokens is not None:
        yield "gen_ai.request.max_tokens", params.max_tokens
    if params.n > 1:
        yield "gen_ai.request.choice.count", params.n


def _response_attributes(answer: Answer, error: JaxserveError | None) -> Iterator[tuple[str, Any]]:
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
    yield from _time_attributes(completions[0].timings)


def _time_attributes(timings: Timings) -> Iterator[tuple[str, Any]]:
    yield "jaxserve.queue_seconds", timings.queue
    if timings.ttft:
        yield "gen_ai.server.time_to_first_token", timings.ttft
        yield "jaxserve.prefill_seconds", max(0.0, timings.ttft - timings.queue)
        yield "jaxserve.decode_seconds", timings.total - timings.ttft
    if timings.tpot:
        yield "gen_ai.server.time_per_output_token", timings.tpot
    yield "jaxserve.preemptions", timings.preemptions
