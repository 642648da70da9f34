"""Prometheus metrics with their types and labels, from the registries that servers build."""

import asyncio
from collections.abc import Iterator

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxserve.server.disaggregation.flags import disaggregation
from jaxserve.server.disaggregation.roles import role_of
from jaxserve.server.flags import parse
from jaxserve.server.observe.expert_load import ExpertLoad
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.readiness import Readiness

PREFILL_SERVER = ("--prefill-server", "127.0.0.1:1")


def metrics() -> dict[str, str]:
    return dict(entry for registry in _registries() for entry in _entries(registry))


def _registries() -> Iterator[CollectorRegistry]:
    """Registries of servers in each role, and of one with experts."""
    for flags in ([], ["--role", "prefill"], ["--role", "decode", *PREFILL_SERVER]):
        registry = Metrics(lambda: 0).registry
        options = parse(flags)
        plan = disaggregation(options.roles, options.credentials)
        role = role_of(plan, Readiness(), registry)
        yield registry
        asyncio.run(role.close())
    experts = CollectorRegistry()
    ExpertLoad(experts, (0,)).take(np.ones((1, 2), np.uint32))
    yield experts


def _entries(registry: CollectorRegistry) -> Iterator[tuple[str, str]]:
    """Names as Prometheus has them: of a histogram the one before _bucket, _sum and _count."""
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = ", ".join(_labels(collector, family))
            yield name, f"{family.type} by {labels}" if labels else family.type


def _labels(collector: Collector, family: Metric) -> Iterator[str]:
    """Labels as declared, with their values where these are words and known from the start."""
    declared = getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ())
    for name in declared:
        values = {sample.labels[name] for sample in family.samples if name in sample.labels}
        words = sorted(value for value in values if not value.isdigit())
        yield f"{name} ({' '.join(words)})" if words else name
