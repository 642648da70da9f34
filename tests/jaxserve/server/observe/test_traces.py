"""Spans of requests, as OpenTelemetry's SDK hands them to an exporter."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from jaxserve.errors import ConfigError
from jaxserve.server.core.limits import Limits
from jaxserve.server.observe.traces import Traces, open_provider
from jaxserve.v1 import inference_pb2
from tests.jaxserve.server.harness import Running
from tests.jaxserve.server.http.harness import TEXT, serving
from tests.jaxserve.server.test_endings import outcome, sampling, start

ROOT = Path(__file__).parents[4]
TRACE = 0x0AF7651916CD43DD8448EB211C80319C
PARENT = 0x00F067AA0BA902B7
TRACEPARENT = f"00-{TRACE:032x}-{PARENT:016x}-01"
NOT_SAMPLED = f"00-{TRACE:032x}-{PARENT:016x}-00"
TIMES = {
    "jaxserve.queue_seconds",
    "jaxserve.prefill_seconds",
    "jaxserve.decode_seconds",
    "gen_ai.server.time_to_first_token",
    "gen_ai.server.time_per_output_token",
}


class Exported:
    """Spans in memory; `traces` is the observer for the server."""

    def __init__(self) -> None:
        self._memory = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._memory))
        self.traces = Traces(provider, "fake")

    def spans(self) -> tuple[ReadableSpan, ...]:
        found = self._memory.get_finished_spans()
        self._memory.clear()
        return found

    def span(self) -> ReadableSpan:
        (found,) = self.spans()
        return found


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


EXPECTED = {
    "gen_ai.operation.name": "text_completion",
    "gen_ai.provider.name": "jaxserve",
    "gen_ai.request.model": "fake",
    "gen_ai.request.temperature": 0.7,
    "gen_ai.request.top_p": 0.9,
    "gen_ai.request.top_k": 5,
    "gen_ai.request.max_tokens": 24,
    "gen_ai.request.choice.count": 2,
    "gen_ai.response.id": "mine",
    "gen_ai.response.finish_reasons": ("length", "length"),
    "gen_ai.usage.output_tokens": 48,
    "gen_ai.usage.cache_read.input_tokens": 0,
    "jaxserve.preemptions": 0,
}


def test_a_request_over_grpc(tmp_path: Path) -> None:
    exported = Exported()

    async def main() -> None:
        before = time.time_ns()
        async with serving(tmp_path, observers=(exported.traces,), seconds=0.002) as http:
            request = inference_pb2.GenerateRequest(
                text=TEXT,
                request_id="mine",
                sampling=sampling(2, temperature=0.7, top_p=0.9, top_k=5),
            )
            metadata = (
                ("traceparent", TRACEPARENT),
                ("tracestate", "vendor=1"),
                ("authorization", "Bearer secret"),
            )
            response = await http.server.inference.Generate(request, metadata=metadata)
            await http.server.at_rest()
        span = exported.span()
        assert (span.name, span.kind, span.status.status_code) == (
            "text_completion fake",
            SpanKind.SERVER,
            StatusCode.UNSET,
        )
        assert span.parent and (span.parent.trace_id, span.parent.span_id) == (TRACE, PARENT)
        assert (
            span.context
            and span.context.trace_id == TRACE
            and span.context.trace_state["vendor"] == "1"
        )
        found = attributes(span)
        expected = EXPECTED | {"gen_ai.usage.input_tokens": response.usage.prompt_tokens}
        assert {name: value for name, value in found.items() if name not in TIMES} == expected
        times = response.choices[0].finish.timings
        assert found["jaxserve.queue_seconds"] == times.queue_seconds
        assert found["jaxserve.prefill_seconds"] == times.prefill_seconds
        assert found["jaxserve.decode_seconds"] == times.decode_seconds
        assert found["gen_ai.server.time_to_first_token"] == times.first_token_seconds
        assert found["gen_ai.server.time_per_output_token"] == pytest.approx(
            times.decode_seconds / 23
        )
        assert (
            span.start_time
            and span.end_time
            and before <= span.start_time < span.end_time <= time.time_ns()
        )
        assert (
            times.total_seconds
            <= (span.end_time - span.start_time) / 1e9
            < times.total_seconds + 60
        )

    asyncio.run(main())


@pytest.mark.system
def test_requests_over_http(tmp_path: Path) -> None:
    """Each prompt has a span with its cached tokens and without any word of prompt or answer."""
    exported = Exported()

    async def main() -> None:
        async with serving(tmp_path, observers=(exported.traces,)) as http:
            headers = {"traceparent": TRACEPARENT}
            body = {"prompt": [TEXT, TEXT + TEXT], "max_tokens": 4, "user": "somebody"}
            assert (await http.post("/v1/completions", body, headers=headers)).status_code == 200
            first, second = exported.spans()
            assert {span.context.trace_id for span in (first, second) if span.context} == {TRACE}
            chat = {"messages": [{"role": "user", "content": TEXT + TEXT}], "stop": ["zebra"]}
            for _ in range(2):
                assert (
                    await http.post("/v1/chat/completions", chat | {"max_tokens": 4})
                ).status_code == 200
            alone, cached = exported.spans()
            assert (
                alone.name == "chat fake"
                and alone.parent is None
                and "gen_ai.request.choice.count" not in attributes(alone)
            )
            assert attributes(cached)["gen_ai.usage.cache_read.input_tokens"] > 0
            told = "".join(span.to_json() for span in (first, second, alone, cached))
            assert "quick" not in told and "zebra" not in told and "somebody" not in told
            await http.server.at_rest()

    asyncio.run(main())


def test_embeddings(tmp_path: Path) -> None:
    exported = Exported()

    async def main() -> None:
        async with serving(tmp_path, observers=(exported.traces,), embeds=True) as http:
            for headers in ({"traceparent": TRACEPARENT}, {}):
                response = await http.post("/v1/embeddings", {"input": TEXT}, headers=headers)
                assert response.status_code == 200
            first, second = exported.spans()
            assert first.name == "embeddings fake" and first.parent and second.parent is None
            assert attributes(first)["gen_ai.usage.input_tokens"] == len(TEXT) + 1
            assert "gen_ai.request.temperature" not in attributes(first)

    asyncio.run(main())


@pytest.mark.system
def test_how_requests_end(tmp_path: Path) -> None:
    exported = Exported()

    async def ended(server: Running, **options: Any) -> ReadableSpan:
        await outcome(start(server, "stream", **options), "stream")
        await server.at_rest()
        return exported.span()

    async def main() -> None:
        limits = Limits(max_request_seconds=0.1)
        async with serving(
            tmp_path, observers=(exported.traces,), limits=limits, seconds=0.02
        ) as http:
            late = await ended(http.server)
        async with serving(tmp_path, observers=(exported.traces,)) as http:
            server = http.server
            refused = await ended(server, text="canary " * 100, timeout=None)
            server.runner.spoils = lambda number, lane, row: number == server.runner.steps
            broken = await ended(server)
            server.runner.spoils = lambda number, lane, row: False
            server.runner.seconds = 0.01
            call = start(server, "stream")
            await call.read()
            call.cancel()
            await server.at_rest()
            cancelled = exported.span()
        assert attributes(late)["error.type"] == "DEADLINE"
        assert (
            attributes(refused)["error.type"] == "CONTEXT_LENGTH_EXCEEDED"
            and "canary" not in refused.to_json()
        )
        assert attributes(broken)["error.type"] == "NON_FINITE_LOGITS"
        for span in (late, refused, broken):
            assert span.status.status_code is StatusCode.ERROR
        assert (
            cancelled.status.status_code is StatusCode.UNSET
            and attributes(cancelled)["jaxserve.cancelled"] is True
        )
        assert "gen_ai.usage.output_tokens" not in attributes(cancelled)

    asyncio.run(main())


@pytest.mark.parametrize("given", ["", "nonsense", "00-0-0-01", "x" * 9000])
def test_a_parent_that_is_none(tmp_path: Path, given: str) -> None:
    exported = Exported()

    async def main() -> None:
        async with serving(tmp_path, observers=(exported.traces,)) as http:
            headers = {"traceparent": given}
            response = await http.post(
                "/v1/completions", {"prompt": TEXT, "max_tokens": 2}, headers=headers
            )
            assert response.status_code == 200
        assert exported.span().parent is None

    asyncio.run(main())


def test_who_calls_decides_what_is_sampled(tmp_path: Path) -> None:
    exported = Exported()

    async def main() -> None:
        async with serving(tmp_path, observers=(exported.traces,)) as http:
            headers = {"traceparent": NOT_SAMPLED}
            await http.post("/v1/completions", {"prompt": TEXT, "max_tokens": 2}, headers=headers)
        assert not exported.spans()

    asyncio.run(main())


def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans go over a socket, as OpenTelemetry's common variables configure it."""
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector

    received: list[Any] = []

    async def export(request: Any, context: Any) -> Any:
        received.append(request)
        return collector.ExportTraceServiceResponse()

    async def main() -> None:
        server = aio.server()
        handler = grpc.unary_unary_rpc_method_handler(
            export,
            collector.ExportTraceServiceRequest.FromString,
            collector.ExportTraceServiceResponse.SerializeToString,
        )
        name = "opentelemetry.proto.collector.trace.v1.TraceService"
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(name, {"Export": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "stories")
        try:
            provider = open_provider()
            provider.get_tracer("x").start_span("one").end()
            await asyncio.to_thread(provider.shutdown)
        finally:
            await server.stop(0)

    asyncio.run(main())
    (spans,) = received[0].resource_spans
    assert [span.name for span in spans.scope_spans[0].spans] == ["one"]
    resource = {entry.key: entry.value.string_value for entry in spans.resource.attributes}
    assert resource["service.name"] == "stories"


def test_what_cannot_be_done_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'http/json'"):
        open_provider()


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(
        ConfigError, match=r"--otel needs OpenTelemetry: .*pip install 'jaxserve\[otel\]'"
    ):
        open_provider()


@pytest.mark.system
def test_nothing_of_it_is_loaded_without_the_flag() -> None:
    script = "import sys, jaxserve.serve; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0
