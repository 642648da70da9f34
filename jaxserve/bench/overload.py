"""bench overload: goodput of a server at and beyond its capacity, of requests with deadlines.

The capacity is the goodput of a closed loop over the same mix of requests and deadlines, with as
many requests in flight as the server has rows. Each load is an open loop: Poisson arrivals at a
multiple of the capacity. Goodput counts requests whose whole answer came within their deadline,
from the moment on at which the first requests have met or missed theirs. A second closed loop at
the end shows whether the overload left anything behind.
"""

from collections.abc import Sequence

from rich.console import Console

from jaxserve.bench.arrivals import Lengths, Process, drawn, due_times
from jaxserve.bench.checks import check_above, check_unused, numbers
from jaxserve.bench.environment import environment
from jaxserve.bench.flags import OverloadOptions
from jaxserve.bench.load import Load, check_target
from jaxserve.bench.loops import Loop
from jaxserve.bench.overload_report import OverloadPoint, OverloadReport
from jaxserve.bench.serve import NONE_ANSWERED, progress, prompts_of
from jaxserve.bench.stopping import ran_to_its_end
from jaxserve.bench.target import Target, address_of, target
from jaxserve.cli.checks import check_new_file
from jaxserve.cli.exits import INTERRUPTED
from jaxserve.cli.inputs import read_prompts
from jaxserve.errors import ConfigError
from jaxserve.flag_errors import flag_error
from jaxserve.plan.plot import picture

MOST_LOAD = 100.0  # multiples of the capacity
MOST_SECONDS = 3600.0
MOST_LEAD_IN = 10.0  # seconds
OF_TRACES = ("trace", "time_scale", "max_prompt_tokens", "max_output_tokens")  # options
ENDLESS = 256  # requests that a closed loop sends over and over


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
