"""bench overload: goodput of a server at and beyond its capacity, of requests with deadlines.

The capacity is the goodput of a closed loop over the same mix of requests and deadlines, with as
many requests in flight as the server has rows. Each load is an open loop: Poisson arrivals at a
multiple of the capacity. Goodput counts requests whose whole answer came within their deadline,
from the moment on at which the first requests have met or missed theirs. A second closed loop at
the end shows whether the overload left anything behind.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

from rich.console import Console

from jaxserve.bench.arrivals import Lengths, Process, drawn, due_times
from jaxserve.bench.checks import check_above, check_unused, numbers
from jaxserve.bench.environment import environment, footnote
from jaxserve.bench.flags import OverloadOptions
from jaxserve.bench.latency import Failure, Outcome, Spread, failures_of
from jaxserve.bench.load import Load, check_target
from jaxserve.bench.loops import LATE_MS, Loop
from jaxserve.bench.output import Grid, comma_separated, markdown
from jaxserve.bench.report import NO_FIGURES
from jaxserve.bench.serve import NONE_ANSWERED, progress, prompts_of
from jaxserve.bench.stopping import ran_to_its_end
from jaxserve.bench.target import Target, address_of, target
from jaxserve.cli.checks import check_new_file
from jaxserve.cli.exits import INTERRUPTED
from jaxserve.cli.inputs import read_prompts
from jaxserve.errors import ConfigError, flag_error
from jaxserve.plan.plot import Chart, Line, picture

BAR = 30  # characters of the longest bar
MOST_LOAD = 100.0  # multiples of the capacity
MOST_SECONDS = 3600.0
MOST_LEAD_IN = 10.0  # seconds
OF_TRACES = ("trace", "time_scale", "max_prompt_tokens", "max_output_tokens")  # options
ENDLESS = 256  # requests that a closed loop sends over and over


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


def bench_overload(options: OverloadOptions) -> int:
    """Measure all loads and return the exit code.

    0; 1 if no request was answered; 130 after Ctrl-C.
    """
    check(options)
    about = {
        "prompt_tokens": options.requests.prompt_tokens,
        "output_tokens": options.requests.output_tokens,
        "choices": options.choices,
        "deadlines": deadlines_of(options),
        "seconds": options.duration,
    }
    report = OverloadReport(environment(options.command_line), about)
    console = Console(stderr=True, highlight=False)
    try:
        if not ran_to_its_end(measure(options, report, console)):
            return INTERRUPTED
    finally:
        if report.points:
            print(report.text(options.output), end="")
    if options.plot:
        options.plot.write_text(picture([report.chart()]))
    return 0 if report.capacity else NONE_ANSWERED


def check(options: OverloadOptions) -> None:
    """Raise ConfigError for options that are wrong whatever the server is."""
    why = "is of `bench serve` (leave it out)"
    check_unused(options.requests, OF_TRACES, why)
    if options.requests.token_scale != 1.0:
        raise ConfigError(f"--token-scale {why}")
    check_above(options, 0, "clients", "choices", "duration")
    loads_of(options)
    deadlines_of(options)
    Lengths.parse(options.requests.prompt_tokens)
    Lengths.parse(options.requests.output_tokens)
    check_target(options.server)
    check_new_file("--plot", options.plot)
    if options.server.target:
        address_of(options.server.target)


def loads_of(options: OverloadOptions) -> list[float]:
    """Return the offered loads, in multiples of the capacity."""
    return numbers("loads", options.loads, float, 0, MOST_LOAD)


def deadlines_of(options: OverloadOptions) -> list[float]:
    """Return the deadlines of requests in seconds."""
    return numbers("deadlines", options.deadlines, float, 0, MOST_SECONDS)


async def measure(options: OverloadOptions, report: OverloadReport, console: Console) -> None:
    """Run every load and add the results to the report.

    The report has what was measured so far, even if this is cancelled or fails.
    """
    file = options.requests.prompts_file
    texts = read_prompts([], file) if file else []
    async with target(options, console) as server:
        report.server = server
        runs = _Runs(options, report, server, texts, console)
        clients = _clients(options, server)
        await runs.run(_closed(options, clients))
        if not report.capacity:
            example = next(iter(report.points[0].failures), "every answer came late")
            raise ConfigError(
                f"no request met its deadline with {clients} at a time ({example}; give a longer "
                f"--deadlines, a shorter --output-tokens or fewer --clients)"
            )
        for load in loads_of(options):
            await runs.run(_open(options, load * report.capacity))
        await runs.run(_closed(options, clients))


def _lead_in(options: OverloadOptions) -> float:
    """Return the seconds until the first requests of a load have met or missed their deadlines."""
    return min(max(deadlines_of(options)), MOST_LEAD_IN)


def _clients(options: OverloadOptions, server: Target) -> int:
    """Return the number of requests in flight of the closed loop."""
    if options.clients:
        return options.clients
    about = server.about or {}
    if "max_batch" not in about:
        problem = f"is missing, and {server.where} does not tell how many rows it has"
        raise flag_error("--clients", None, problem)
    mesh = about.get("mesh", {})
    lanes = mesh.get("data", 1) * mesh.get("expert", 1)
    return max(1, about["max_batch"] * lanes // options.choices)


def _open(options: OverloadOptions, rate: float) -> Load:
    process = Process("poisson", rate)
    seconds = _lead_in(options) + options.duration
    due = due_times(process.gaps(options.requests.seed), None, seconds)
    return Load(drawn(due, *_lengths(options), options.requests.seed), rate=rate)


def _closed(options: OverloadOptions, clients: int) -> Load:
    seconds = _lead_in(options) + options.duration
    arrivals = drawn([0.0] * ENDLESS, *_lengths(options), options.requests.seed)
    return Load(arrivals, concurrency=clients, seconds=seconds, endless=True)


def _lengths(options: OverloadOptions) -> tuple[Lengths | None, Lengths]:
    requests = options.requests
    prompts = None if requests.prompts_file else Lengths.parse(requests.prompt_tokens)
    return prompts, Lengths.parse(requests.output_tokens)


class _Runs:
    """The runs of all loads against one server, each with prompts of its own."""

    def __init__(
        self,
        options: OverloadOptions,
        report: OverloadReport,
        server: Target,
        texts: Sequence[str],
        console: Console,
    ):
        self._options = options
        self._report = report
        self._server = server
        self._texts = texts
        self._console = console
        self._number = 0

    async def run(self, load: Load) -> None:
        """Send a load, and add its results to the report."""
        options = self._options
        self._server.check_fits(load.arrivals)
        self._number += 1
        prompts = prompts_of(self._server, self._texts, options.requests.seed, self._number)
        in_flight = load.concurrency or len(load.arrivals)
        async with self._server.caller(options, in_flight, options.choices) as caller:
            loop = Loop(
                caller,
                prompts,
                options.requests.timeout,
                may_end_early=options.server.strict or not options.requests.ignore_eos,
                choices=options.choices,
                deadlines=deadlines_of(options),
            )
            with progress(self._console, loop, load):
                await loop.run(load)
        point = OverloadPoint.of(load, loop.outcomes, _lead_in(options), options.duration)
        self._report.points.append(point)
