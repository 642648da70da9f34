"""Metrics of disaggregated prefill, named as the server's other metrics are."""

from collections import Counter as Counts
from collections.abc import Callable, Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.cluster.transfer.byte_budget import ByteBudget
from jaxserve.cluster.transfer.offers import OfferStore
from jaxserve.server.disaggregation.policy import Decision
from jaxserve.server.disaggregation.prefill_pool import State
from jaxserve.server.observe.histogram import Histogram
from jaxserve.server.observe.metrics import LONG, PREFIX

NAME = PREFIX + "disaggregation_"


class DecodeMetrics:
    """Counters of a server that has prompts computed elsewhere."""

    def __init__(self, registry: CollectorRegistry):
        self._decisions = Counter(
            NAME + "decisions",
            "prompts by where they are computed",
            ("decision",),
            registry=registry,
        )
        for decision in Decision:
            self._decisions.labels(decision)
        self._failures = Counter(
            NAME + "failures",
            "remote prefills of which some pages did not come, by the reason",
            ("reason",),
            registry=registry,
        )
        self._bytes = Counter(
            NAME + "received_bytes", "bytes of keys and values that came", registry=registry
        )
        self._seconds = Histogram(
            NAME + "seconds",
            "seconds of a remote prefill whose pages all came: from the decision to the last page",
            LONG,
            registry,
        )

    def decided(self, decision: Decision) -> None:
        """Count a decision of a prompt."""
        self._decisions.labels(decision).inc()

    def received(self, nbytes: int) -> None:
        """Count pages that came."""
        self._bytes.inc(nbytes)

    def ended(self, seconds: float, failure: str | None) -> None:
        """Count a remote prefill that has ended.

        `failure` says why some pages did not come, as a gRPC code in lower case; None: all came.
        """
        if failure:
            self._failures.labels(failure).inc()
        else:
            self._seconds.observe(seconds)


class ServerMetrics(Collector):
    """Gauges of a decode server: its buffer and its prefill servers.

    `states` counts the prefill servers by their state; it is called at every scrape.
    """

    def __init__(
        self, registry: CollectorRegistry, budget: ByteBudget, states: Callable[[], Counts[State]]
    ):
        self._states = states
        Gauge(
            NAME + "buffer_bytes", "bytes of received segments in memory", registry=registry
        ).set_function(lambda: budget.held)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            NAME + "prefill_servers", "known prefill servers by their state", labels=("state",)
        )
        states = self._states()
        for state in State:
            family.add_metric((str(state),), states[state])
        yield family


class PrefillMetrics(Collector):
    """Metrics of a prefill server: the segments that it offered."""

    def __init__(self, registry: CollectorRegistry, offers: OfferStore):
        self._offers = offers
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        counts = self._offers.counts
        pieces = CounterMetricFamily(
            NAME + "pieces", "offered segments by what became of them", labels=("fate",)
        )
        fates = [field.name for field in fields(counts) if field.name not in ("offered", "bytes")]
        for fate in fates:
            pieces.add_metric((fate,), getattr(counts, fate))
        yield pieces
        yield CounterMetricFamily(
            NAME + "sent_bytes", "bytes of keys and values that were fetched", counts.bytes
        )
        yield GaugeMetricFamily(
            NAME + "buffer_bytes", "bytes of segments on offer", self._offers.budget.held
        )
