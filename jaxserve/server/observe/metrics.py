"""Prometheus metrics, with vLLM's names after the prefix, so that dashboards can be reused."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import Metric

from jaxserve.engine.engine_thread import ComputeTotals, EngineThread, Loads, StepReport
from jaxserve.errors import JaxserveError
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.observe.expert_load import ExpertLoad
from jaxserve.server.observe.histogram import Histogram

PREFIX = "jaxserve:"
# Upper bounds of histograms, in seconds: SHORT of a token, LONG of a request, HOST of a step.
SHORT = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)
HOST = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)


class Metrics:
    """The server's metrics, in a registry of their own; a RequestObserver.

    Args:
        compiles: Function that returns the number of compiles that a request has waited for, called
            at every scrape.
        ready: Function that says whether requests are accepted, called at every scrape.
        queue_seconds: Function that returns the wait of a new request, called at every scrape.
        background_compiles: Function that returns the number of compiles beside requests, called at
            every scrape.
        buckets_pending: Function that returns the number of steps yet to come, called at every
            scrape.
    """

    def __init__(
        self,
        compiles: Callable[[], int],
        ready: Callable[[], bool] = lambda: True,
        queue_seconds: Callable[[], float] = lambda: 0.0,
        background_compiles: Callable[[], int] = lambda: 0,
        buckets_pending: Callable[[], int] = lambda: 0,
    ):
        self.registry = registry = CollectorRegistry()  # others may add metrics to it
        # Apart, because the thousands of numbers of many experts take long to write.
        self._experts = CollectorRegistry()
        self._load: ExpertLoad | None = None
        self._add_engine_metrics(registry)
        self._add_request_metrics(registry)
        _gauge(
            registry,
            "compiles_after_ready",
            "compiles that a request has waited for; it stays 0 unless something is wrong",
        ).set_function(compiles)
        _gauge(
            registry,
            "background_compiles",
            "compiles of steps beside requests, those answered by the cache included",
        ).set_function(background_compiles)
        _gauge(
            registry,
            "buckets_pending",
            "shapes of steps that are not compiled yet, in whose place larger ones serve",
        ).set_function(buckets_pending)
        _gauge(
            registry, "ready", "1 while requests are accepted, 0 before and afterwards"
        ).set_function(ready)
        _gauge(
            registry, "queue_seconds", "seconds that a new request would wait for its row"
        ).set_function(queue_seconds)
        # Of the last report: its counters are totals, Prometheus's are increased by differences.
        self._totals = ComputeTotals()
        self._loads = Loads()
        self._uncounted = 0  # generated tokens that `_generated` does not have yet

    def _add_engine_metrics(self, registry: CollectorRegistry) -> None:
        gauge = partial(_gauge, registry)
        counter = partial(_counter, registry)
        histogram = partial(_histogram, registry)
        self._running = gauge("num_requests_running", "choices that have a row")
        self._waiting = gauge("num_requests_waiting", "choices that wait for a row")
        self._usage = gauge("kv_cache_usage_perc", "share of the pages that requests hold, 0 to 1")
        self._preemptions = counter(
            "num_preemptions", "choices that lost their row to make room for others"
        )
        self._verifications = counter(
            "spec_decode_num_drafts", "verifications of a choice's drafts"
        )
        self._drafted = counter("spec_decode_num_draft_tokens", "drafted tokens that were verified")
        self._accepted = counter(
            "spec_decode_num_accepted_tokens", "drafted tokens that were accepted"
        )
        self._padding = counter("padding_tokens", "computed tokens that belong to no request")
        self._computed = counter(
            "computed_tokens", "tokens that the device computed, padding included"
        )
        self._host = histogram(
            "step_host_seconds", "seconds of a step not spent waiting for the device", HOST
        )

    def _add_request_metrics(self, registry: CollectorRegistry) -> None:
        counter = partial(_counter, registry)
        histogram = partial(_histogram, registry)
        self._queries = counter("prefix_cache_queries", "prompt tokens that were looked up")
        self._hits = counter("prefix_cache_hits", "prompt tokens that were found")
        self._prompt_tokens = counter("prompt_tokens", "tokens of prompts")
        self._generated = counter("generation_tokens", "tokens generated for clients")
        self._success = counter("request_success", "finished choices", ("finished_reason",))
        self._failures = counter(
            "request_failure", "requests that ended with an error or were refused", ("reason",)
        )
        self._ignored = counter(
            "ignored_fields",
            "fields of requests that changed nothing; other are those that no list has",
            ("field",),
        )
        self._cancelled = counter("request_cancelled", "requests whose client disconnected")
        self._ttft = histogram(
            "time_to_first_token_seconds",
            "seconds from the end of tokenizing to the first token",
            LONG,
        )
        self._itl = histogram(
            "inter_token_latency_seconds", "seconds between messages of a choice, per token", SHORT
        )
        self._tpot = histogram(
            "request_time_per_output_token_seconds",
            "mean seconds per token of a choice, after its first token",
            SHORT,
        )
        self._e2e = histogram(
            "e2e_request_latency_seconds",
            "seconds from arrival in the engine to the end of a choice",
            LONG,
        )
        self._queue = histogram(
            "request_queue_time_seconds",
            "seconds from arrival in the engine to the first step",
            LONG,
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "seconds from the first step to the first token", LONG
        )
        self._decode = histogram(
            "request_decode_time_seconds", "seconds from the first token to the last", LONG
        )

    def watch_experts(
        self, layers: Sequence[int], thread: EngineThread, read: Callable[[], np.ndarray]
    ) -> None:
        """Export the load of the experts from now on; see ExpertLoad. Called on the event loop."""
        self._load = ExpertLoad(self._experts, layers)
        self._watching = asyncio.ensure_future(self._load.watch(thread, read))

    async def text(self) -> bytes:
        """Return all metrics in Prometheus's text format; those of experts from another thread."""
        return self.render() + await asyncio.to_thread(generate_latest, self._experts)

    def render(self) -> bytes:
        """Return all metrics but the experts' in Prometheus's text format."""
        self._count_generated()
        return generate_latest(self.registry)

    def families(self) -> list[Metric]:
        """Return all metrics as objects; of the experts' only the imbalance."""
        self._count_generated()
        return [*self.registry.collect(), *(self._load.imbalance() if self._load else ())]

    def _count_generated(self) -> None:
        # Counted in an int meanwhile: a counter takes a lock, and tokens come by the thousand.
        self._generated.inc(self._uncounted)
        self._uncounted = 0

    def refused(self, incoming: IncomingRequest, error: JaxserveError) -> None:
        self._failures.labels(error.reason).inc()

    def stepped(self, report: StepReport) -> None:
        self._running.set(report.loads.running)
        self._waiting.set(report.loads.waiting)
        self._usage.set(report.loads.pages_used / max(report.loads.pages_total, 1))
        self._host.observe(report.host_seconds)
        self._preemptions.inc(report.loads.preemptions - self._loads.preemptions)
        self._verifications.inc(report.loads.verifications - self._loads.verifications)
        self._drafted.inc(report.loads.drafted - self._loads.drafted)
        self._accepted.inc(report.loads.accepted - self._loads.accepted)
        self._loads = report.loads
        computed = report.totals.computed_tokens - self._totals.computed_tokens
        self._computed.inc(computed)
        self._padding.inc(max(0, computed - (report.totals.live_tokens - self._totals.live_tokens)))
        self._totals = report.totals

    def received(self, answer: Answer, tokens: int, first: bool, seconds: float) -> None:
        self._uncounted += tokens
        if first:
            self._ttft.observe(seconds)
        else:
            self._itl.observe(seconds / tokens)

    def ended(self, answer: Answer, error: JaxserveError | None) -> None:
        if answer.times and answer.times.admitted:
            self._prompt_tokens.inc(answer.prompt_tokens)
            self._queries.inc(answer.prompt_tokens)
            self._hits.inc(answer.times.cached)
        for field in answer.ignored:
            # Names of the client's choice would make as many counters as it likes.
            self._ignored.labels(field.name if field.listed else "other").inc()
        if error:
            self._failures.labels(error.reason).inc()
        elif answer.prefilled:
            self._success.labels("prefilled").inc()
        elif not answer.completions or len(answer.completions) < answer.prepared.request.params.n:
            self._cancelled.inc()
        for completion in answer.completions:
            times = completion.timings
            if not answer.prefilled:
                self._success.labels(completion.finish_reason).inc()
            self._e2e.observe(times.total)
            # A choice that never got a row has no queue time: it has waited all the time.
            self._queue.observe(times.queue or times.total)
            if times.ttft:
                self._prefill.observe(max(0.0, times.ttft - times.queue))
                self._decode.observe(times.total - times.ttft)
            if len(completion.token_ids) > 1:
                self._tpot.observe(times.tpot)


def _gauge(registry: CollectorRegistry, name: str, what: str) -> Gauge:
    return Gauge(PREFIX + name, what, registry=registry)


def _counter(
    registry: CollectorRegistry, name: str, what: str, labels: tuple[str, ...] = ()
) -> Counter:
    return Counter(PREFIX + name, what, labels, registry=registry)


def _histogram(
    registry: CollectorRegistry, name: str, what: str, bounds: tuple[float, ...]
) -> Histogram:
    return Histogram(PREFIX + name, what, bounds, registry)
