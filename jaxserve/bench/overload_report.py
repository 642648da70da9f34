"""Results of bench overload as a table, a chart, CSV and JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

from jaxserve.bench.environment import footnote
from jaxserve.bench.latency import Failure, Outcome, Spread, failures_of
from jaxserve.bench.load import Load
from jaxserve.bench.loops import LATE_MS
from jaxserve.bench.output import Grid, comma_separated, markdown
from jaxserve.bench.report import NO_FIGURES
from jaxserve.bench.target import Target
from jaxserve.plan.plot import Chart, Line

BAR = 30  # characters of the longest bar


@dataclass(frozen=True, kw_only=True)
class OverloadPoint:
    """Results of one load."""

    load: str
    offered_per_second: float | None  # None in a closed loop
    sent: int
    good: int  # whole answers within their deadline
    late: int  # whole answers after it
    refused: int  # requests that failed at once, with a time to come back
    expired: int  # other requests that failed before their first token
    cut: int  # requests that failed after their first token: computed for nothing
    goodput: float  # good requests per second
    refusal: Spread | None  # ms from sending a request that is refused to its refusal
    ttft: Spread | None  # ms, of the good requests
    lag: Spread | None  # ms by which requests were sent late
    failures: dict[str, Failure]  # by status

    @classmethod
    def of(
        cls, load: Load, outcomes: Sequence[Outcome], lead_in: float, seconds: float
    ) -> "OverloadPoint":
        """Return the results of a load.

        Args:
            lead_in: Seconds at the beginning that do not count for the goodput.
            seconds: Seconds that count.
        """
        good = [o for o in outcomes if o.ok and o.e2e <= (o.deadline or inf)]
        begin = min((o.sent for o in outcomes), default=0.0) + lead_in
        counted = sum(begin <= o.ended < begin + seconds for o in good)
        failed = [o for o in outcomes if not o.ok]
        unbegun = [o for o in failed if not o.received]
        refused = [o for o in unbegun if o.retry_after is not None]
        return cls(
            load=str(load),
            offered_per_second=None if load.concurrency else round(load.rate or 0.0, 3),
            sent=len(outcomes),
            good=len(good),
            late=len(outcomes) - len(failed) - len(good),
            refused=len(refused),
            expired=len(unbegun) - len(refused),
            cut=len(failed) - len(unbegun),
            goodput=round(counted / seconds, 3),
            refusal=Spread.of(o.e2e for o in refused),
            ttft=Spread.of(o.ttft for o in good),
            lag=Spread.of(o.sent - o.due for o in outcomes),
            failures=failures_of(failed),
        )

    def row(self) -> dict[str, Any]:
        """Return a row of CSV; columns of a spread without samples are empty."""
        row = asdict(self)
        failures = " ".join(f"{status}:{each.count}" for status, each in self.failures.items())
        spreads = {name: row[name] or NO_FIGURES for name in ("refusal", "ttft", "lag")}
        return row | spreads | {"failures": failures}

    @property
    def remarks(self) -> list[str]:
        """Lines that a reader needs beside the figures."""
        lines = [
            f"{failure.count} x {status}: {failure.example}"
            for status, failure in self.failures.items()
        ]
        if self.offered_per_second and self.lag and self.lag.p99 > LATE_MS:
            lines.append(
                f"requests were sent late, p99 {self.lag.p99:.1f} ms: the load generator was at "
                f"its limit, too (give it a core of its own)"
            )
        return lines


@dataclass
class OverloadReport:
    """Results of all loads; the first is the capacity, the last the capacity afterwards."""

    environment: dict[str, Any]  # see bench.environment
    about: dict[str, Any]  # the requests
    server: Target | None = None  # None until there is one
    points: list[OverloadPoint] = field(default_factory=list)

    @property
    def capacity(self) -> float:
        """Goodput of the first closed loop, in requests per second."""
        return self.points[0].goodput if self.points else 0.0

    def text(self, output: str) -> str:
        """Return the results as md, csv or json."""
        if output == "json":
            return json.dumps(self.to_json(), indent=1) + "\n"
        if output == "csv":
            return comma_separated([point.row() for point in self.points])
        lines = [markdown(self._table())]
        for point in self.points:
            lines += [f"{point.load}: {line}  " for line in point.remarks]
        if self.server:
            note = footnote(self.environment, self.server.device)
            lines.append(f"{self.server.model} at {self.server.where}; {note}")
        return "\n".join([*lines, ""])

    def to_json(self) -> dict[str, Any]:
        server = self.server
        return {
            "environment": self.environment | {"device": server.device if server else None},
            "benchmark": "overload",
            "server": server and {"where": server.where, "about": server.about},
            "requests": self.about,
            "capacity": self.capacity,
            "results": [asdict(point) for point in self.points],
        }

    def chart(self) -> Chart:
        """Return goodput against offered load."""
        offered = [(p.offered_per_second, p.goodput) for p in self.points if p.offered_per_second]
        good = [(x, y) for x, y in sorted(offered) if y > 0]  # the scale is logarithmic
        capacity = [(0.0, self.capacity), (max(x for x, _ in offered), self.capacity)]
        return Chart(
            "goodput of requests with deadlines",
            "offered requests/s",
            "good requests/s",
            [Line("goodput", "goodput", good), Line("capacity", "capacity", capacity, dashed=True)],
        )

    def _table(self) -> Grid:
        columns = (
            *("load", "sent", "good", "late", "refused", "expired", "cut", "goodput/s"),
            *("refused after p50 ms", "p99 ms", "TTFT p50 ms", "of capacity", ""),
        )
        return Grid(columns, [self._row(point) for point in self.points])

    def _row(self, point: OverloadPoint) -> list[str]:
        share = point.goodput / self.capacity if self.capacity else 0.0
        refusal = point.refusal
        return [
            point.load,
            *map(str, (point.sent, point.good, point.late)),
            *map(str, (point.refused, point.expired, point.cut)),
            f"{point.goodput:.2f}",
            f"{refusal.p50:.1f}" if refusal else "-",
            f"{refusal.p99:.1f}" if refusal else "-",
            f"{point.ttft.p50:.1f}" if point.ttft else "-",
            f"{share:.0%}",
            "█" * round(BAR * min(share, 1.5)),
        ]
