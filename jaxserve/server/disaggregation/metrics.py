"""What prompts that are computed elsewhere come to, in numbers; named as the other metrics are."""

from collections import Counter as Counts
from collections.abc import Callable, Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.cluster.transfer.byte_budget import Budget
from jaxserve.cluster.transfer.offers import Shelf
from jaxserve.server.disaggregation.policy import Decision
from jaxserve.server.disaggregation.prefill_pool import State
from jaxserve.server.observe.histogram import Histogram
from jaxserve.server.observe.metrics import LONG, PREFIX

NAME = PREFIX + "disaggregation_"
SECONDS = "of a prompt's trip of which everything came: from the decision to the last of its pages"


class DecodeMetrics:
    """Of whoever decodes what was computed elsewhere; an `Observer` of its handovers."""

    def __init__(self, registry: CollectorRegistry):
        self._decisions = Counter(
            NAME + "decisions", "where prompts are computed", ("decision",), registry=registry
        )
        for decision in Decision:
            self._decisions.labels(decision)
        self._failures = Counter(
            NAME + "failures",
            "handovers of which not everything came",
            ("reason",),
            registry=registry,
        )
        self._bytes = Counter(
            NAME + "received_bytes", "keys and values that came", registry=registry
        )
        self._seconds = Histogram(NAME + "seconds", SECONDS, LONG, registry)

    def decided(self, decision: Decision) -> None:
        self._decisions.labels(decision).inc()

    def received(self, nbytes: int) -> None:
        self._bytes.inc(nbytes)

    def ended(self, seconds: float, failure: str | None) -> None:
        if failure:
            self._failures.labels(failure).inc()
        else:
            self._seconds.observe(seconds)


class ServerMetrics(Collector):
    """Of a decode server. states: of the prefill servers, asked at every scrape."""

    def __init__(
        self, registry: CollectorRegistry, budget: Budget, states: Callable[[], Counts[State]]
    ):
        self._states = states
        Gauge(NAME + "buffer_bytes", "of pieces that are here", registry=registry).set_function(
            lambda: budget.held
        )
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            NAME + "prefill_servers", "that are known, by their state", labels=("state",)
        )
        states = self._states()
        for state in State:
            family.add_metric((str(state),), states[state])
        yield family


class PrefillMetrics(Collector):
    """Of a prefill server: what became of the pieces that it offered."""

    def __init__(self, registry: CollectorRegistry, shelf: Shelf):
        self._shelf = shelf
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        counts = self._shelf.counts
        pieces = CounterMetricFamily(
            NAME + "pieces", "that were offered, by what became of them", labels=("fate",)
        )
        for fate in (
            field.name for field in fields(counts) if field.name not in ("offered", "bytes")
        ):
            pieces.add_metric((fate,), getattr(counts, fate))
        yield pieces
        yield CounterMetricFamily(
            NAME + "sent_bytes", "keys and values that were fetched", counts.bytes
        )
        yield GaugeMetricFamily(
            NAME + "buffer_bytes", "of pieces that are on offer", self._shelf.budget.held
        )
