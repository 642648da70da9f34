"""Handovers of a decode server under a load, from its metrics before and after."""

from collections import Counter
from dataclasses import dataclass
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from jaxserve.server.disaggregation.metrics import NAME

type Counts = Counter[tuple[str, ...]]  # samples by name and labels


@dataclass(frozen=True)
class Handovers:
    """Counts of a decode server under a load: prompts by decision, failures by reason.

    seconds: of a trip, in the mean; None without trips.
    """

    decisions: dict[str, int]
    failures: dict[str, int]
    mebibytes: float
    seconds: float | None


def handovers_between(before: Counts, after: Counts) -> Handovers:
    """Return what happened between two readings of the metrics."""
    added = after - before

    def by_label(name: str) -> dict[str, int]:
        return {key[1]: round(value) for key, value in added.items() if key[0] == name}

    trips = added["seconds_count",]
    return Handovers(
        decisions=by_label("decisions_total"),
        failures=by_label("failures_total"),
        mebibytes=round(added["received_bytes_total",] / 2**20, 2),
        seconds=round(added["seconds_sum",] / trips, 4) if trips else None,
    )


def read_counts(url: str) -> Counts:
    """Read a server's metrics of disaggregation."""
    with urlopen(url, timeout=10) as answer:
        return counts_in(answer.read().decode())


def counts_in(text: str) -> Counts:
    """Return the metrics of disaggregation, by name without prefix and by label values."""
    families = text_string_to_metric_families(text)
    samples = (
        sample for family in families for sample in family.samples if sample.name.startswith(NAME)
    )
    return Counter({(s.name.removeprefix(NAME), *s.labels.values()): s.value for s in samples})
