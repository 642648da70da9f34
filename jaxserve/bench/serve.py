"""bench serve: latency and throughput of a server, measured at the client.

Prompts are random tokens (or texts of a file), and answers have exactly the number of tokens that
was asked for: they are greedy, and blind to end tokens unless the flags say otherwise.
jaxserve.bench.latency defines what is measured, jaxserve.bench.loops how requests are sent.

The load generator has limits of its own: how late it sent requests is measured and reported, with a
warning if that would spoil the figures. After Ctrl-C, what was measured so far is reported. The
server tells which device it has: the generator does not import jax, which would take its memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxserve.bench.arrivals import Arrival, mean_gap
from jaxserve.bench.caller import Caller
from jaxserve.bench.environment import environment
from jaxserve.bench.flags import BenchServeOptions
from jaxserve.bench.latency import Objective, summarize
from jaxserve.bench.load import Load, check, loads_of
from jaxserve.bench.loops import Loop, lateness
from jaxserve.bench.prompts import Prompts, RandomPrompts, TextPrompts
from jaxserve.bench.report import Point, Report
from jaxserve.bench.stopping import ran_to_its_end
from jaxserve.bench.target import Target, address_of, target
from jaxserve.cli.exits import INTERRUPTED
from jaxserve.cli.inputs import read_prompts
from jaxserve.errors import ConfigError

REFRESHES = 2  # of the progress bar, per second; each refresh holds up the event loop
NONE_ANSWERED = 1


def bench_serve(options: BenchServeOptions) -> int:
    """Measure all loads and return the exit code.

    0; 1 if no request was answered; 130 after Ctrl-C.
    """
    check(options)
    loads_of(options, 0)  # raises for wrong flags before a server is started
    if options.server.target:
        address_of(options.server.target)
    objective = Objective.parse(options.slo) if options.slo else Objective()
    report = Report(environment(options.command_line), objective)
    console = Console(stderr=True, highlight=False)
    try:
        if not ran_to_its_end(measure(options, report, console)):
            return INTERRUPTED
    finally:
        if report.points:
            print(report.text(options.output), end="")
    return 0 if any(point.summary.ok for point in report.points) else NONE_ANSWERED


async def measure(options: BenchServeOptions, report: Report, console: Console) -> None:
    """Run every load as often as asked for, and add the results to the report.

    The report has what was measured so far, even if this is cancelled or fails.
    """
    file = options.requests.prompts_file
    texts = read_prompts([], file) if file else []
    async with target(options, console) as server:
        report.server = server
        runs = [
            (repetition, load)
            for repetition in range(options.repetitions)
            for load in loads_of(options, repetition)
        ]
        for _, load in runs:
            server.check_fits(load.arrivals)
        in_flight = max(load.concurrency or len(load.arrivals) for _, load in runs)
        seed = options.requests.seed
        prompts = [prompts_of(server, texts, seed, number) for number in range(1 + len(runs))]
        async with server.caller(options, in_flight) as caller:
            first = runs[0][1].arrivals[: options.pace.warm_up]
            await warm_up(loop_of(options, caller, prompts[0]), first)
            before = await server.compiles()
            for (repetition, load), asked in zip(runs, prompts[1:], strict=True):
                loop = loop_of(options, caller, asked)
                try:
                    with progress(console, loop, load):
                        await loop.run(load)
                finally:
                    if loop.outcomes:
                        report.add(point_of(load, repetition, loop, report.objective), console)
        after = await server.compiles()
        report.compiles_after_ready = after.waited_for
        report.background_compiles = after.beside - before.beside


def prompts_of(server: Target, texts: Sequence[str], seed: int, run: int) -> Prompts:
    """Return the prompts of a run: texts, or random tokens that no other run has."""
    if texts:
        return TextPrompts(texts)
    return RandomPrompts(server.vocab_size or 0, server.not_drawn, seed, run)


def loop_of(options: BenchServeOptions, caller: Caller, prompts: Prompts) -> Loop:
    may_end_early = options.server.strict or not options.requests.ignore_eos
    return Loop(caller, prompts, options.requests.timeout, may_end_early)


async def warm_up(loop: Loop, arrivals: Sequence[Arrival]) -> None:
    """Send requests at once and throw the results away; ConfigError if all of them fail."""
    await loop.open([replace(a, due=0.0) for a in arrivals])
    if loop.outcomes and not any(o.ok for o in loop.outcomes):
        failed = loop.outcomes[0]
        raise ConfigError(
            f"no request of the warm-up was answered: {failed.status}: {failed.error}"
        )


def point_of(load: Load, repetition: int, loop: Loop, objective: Objective) -> Point:
    """Return the results of a run."""
    summary = summarize(loop.outcomes, objective)
    gap = 0.0 if load.concurrency else mean_gap(load.arrivals)
    until_the_end = not (load.concurrency and load.seconds)
    unsent = until_the_end and summary.requests < len(load.arrivals)
    return Point(
        load=str(load),
        repetition=repetition,
        offered_per_second=round(1 / gap, 4) if gap else None,
        concurrency=load.concurrency,
        capped=load.capped,
        peak_in_flight=loop.peak_in_flight,
        interrupted=bool(unsent or summary.unfinished),
        warning="" if load.concurrency else lateness(summary.lag, load.arrivals),
        summary=summary,
    )


@contextmanager
def progress(console: Console, loop: Loop, load: Load) -> Iterator[None]:
    """Show a progress bar while a loop runs."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        TextColumn(str(load)),
        *columns,
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        refresh_per_second=REFRESHES,
    ) as bar:
        task = bar.add_task("", total=None if load.endless else len(load.arrivals))

        def changed(loop: Loop) -> None:
            done = len(loop.outcomes) - loop.in_flight
            bar.update(task, completed=done, description=f"{loop.in_flight} in flight")

        loop.changed = changed
        yield
