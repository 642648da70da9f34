"""Prometheus metrics, named as vLLM's after the prefix, so that dashboards port."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import Metric

from jaxserve.errors import JaxserveError
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.engine_thread import ComputeTotals, EngineThread, Loads, StepReport
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.observe.expert_load import ExpertLoad
from jaxserve.server.observe.histogram import Histogram

PREFIX = "jaxserve:"
SHORT = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
)  # seconds
LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)
HOST = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)


class Metrics:
    """An observer of the service, with a registry of its own. compiles, ready: asked at every
    scrape.
    """

    def __init__(self, compiles: Callable[[], int], ready: Callable[[], bool] = lambda: True):
        self.registry = registry = CollectorRegistry()  # for more metrics
        self._experts = CollectorRegistry()
        self._load: ExpertLoad | None = None

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(PREFIX + name, what, registry=registry)

        def counter(name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(PREFIX + name, what, labels, registry=registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...] = LONG) -> Histogram:
            return Histogram(PREFIX + name, what, buckets, registry)

        self._running = gauge("num_requests_running", "choices that have a row")
        self._waiting = gauge("num_requests_waiting", "choices that wait for a row")
        self._usage = gauge("kv_cache_usage_perc", "share of the pages that requests hold, 0 to 1")
        self._queries = counter("prefix_cache_queries", "prompt tokens that were looked up")
        self._hits = counter("prefix_cache_hits", "prompt tokens that were found")
        self._preemptions = counter("num_preemptions", "choices set back to make room for others")
        self._verifications = counter(
            "spec_decode_num_drafts", "verifications of a choice's drafts"
        )
        self._drafted = counter("spec_decode_num_draft_tokens", "drafted tokens that were verified")
        self._accepted = counter("spec_decode_num_accepted_tokens", "those of them that were right")
        self._prompt_tokens = counter("prompt_tokens", "tokens of prompts")
        self._generated = counter("generation_tokens", "tokens made for clients")
        self._success = counter("request_success", "finished choices", ("finished_reason",))
        self._failures = counter(
            "request_failure", "requests that ended with an error or were refused", ("reason",)
        )
        self._cancelled = counter("request_cancelled", "requests whose client went away")
        self._ttft = histogram(
            "time_to_first_token_seconds", "from the end of tokenizing to the first token", LONG
        )
        self._itl = histogram(
            "inter_token_latency_seconds", "between messages of a choice, per token", SHORT
        )
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "mean of a choice after its first", SHORT
        )
        self._e2e = histogram(
            "e2e_request_latency_seconds", "from arrival in the engine to the end"
        )
        self._queue = histogram("request_queue_time_seconds", "until the first step")
        self._prefill = histogram(
            "request_prefill_time_seconds", "from the first step to the first token"
        )
        self._decode = histogram("request_decode_time_seconds", "from the first token to the last")
        self._padding = counter("padding_tokens", "computed tokens that nobody asked for")
        self._computed = counter(
            "computed_tokens", "tokens that the device computed, padding among them"
        )
        self._host = histogram(
            "step_host_seconds", "of a step, not spent waiting for the device", HOST
        )
        gauge(
            "compiles_after_ready", "steps compiled while serving: 0, or something is wrong"
        ).set_function(compiles)
        gauge("ready", "1 while requests are accepted, 0 before and afterwards").set_function(ready)
        self._totals, self._loads = ComputeTotals(), Loads()
        self._uncounted = 0  # generated tokens that the counter does not have yet

    def watch_experts(
        self, layers: Sequence[int], thread: EngineThread, read: Callable[[], np.ndarray]
    ) -> None:
        """Tell of the experts' load from now on. Called in the event loop; arguments as those of
        ExpertLoad.
        """
        self._load = ExpertLoad(self._experts, layers)
        self._watching = asyncio.ensure_future(self._load.watch(thread, read))

    async def text(self) -> bytes:
        """All of it; what tells of thousands of experts is written beside the event loop."""
        return self.render() + await asyncio.to_thread(generate_latest, self._experts)

    def render(self) -> bytes:
        """Prometheus's text format; of everything but the experts."""
        self._count_generated()
        return generate_latest(self.registry)

    def families(self) -> list[Metric]:
        """The same as objects, and of the experts how uneven their load is."""
        self._count_generated()
        return [*self.registry.collect(), *(self._load.imbalance() if self._load else ())]

    def _count_generated(self) -> None:
        self._generated.inc(self._uncounted)
        self._uncounted = 0

    def refused(self, call: IncomingRequest, error: JaxserveError) -> None:
        self._failures.labels(error.reason).inc()

    def stepped(self, news: StepReport) -> None:
        self._running.set(news.loads.running)
        self._waiting.set(news.loads.waiting)
        self._usage.set(news.loads.pages_used / max(news.loads.pages_total, 1))
        self._host.observe(news.host_seconds)
        self._preemptions.inc(news.loads.preemptions - self._loads.preemptions)
        self._verifications.inc(news.loads.verifications - self._loads.verifications)
        self._drafted.inc(news.loads.drafted - self._loads.drafted)
        self._accepted.inc(news.loads.accepted - self._loads.accepted)
        self._loads = news.loads
        computed = news.totals.computed_tokens - self._totals.computed_tokens
        self._computed.inc(computed)
        self._padding.inc(max(0, computed - (news.totals.live_tokens - self._totals.live_tokens)))
        self._totals = news.totals

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
            self._queue.observe(
                times.queue or times.total
            )  # one that was never admitted waited all the time
            if times.ttft:
                self._prefill.observe(max(0.0, times.ttft - times.queue))
                self._decode.observe(times.total - times.ttft)
            if len(completion.token_ids) > 1:
                self._tpot.observe(times.tpot)
