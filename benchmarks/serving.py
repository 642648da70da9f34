"""How long do people wait for a server, and how much does it serve? An open loop of requests, measured at the client.

    python -m benchmarks.serving --rate 2 --requests 100 --prompt-tokens 128 --output-tokens 32-96
    python -m benchmarks.serving --trace conversation_trace.jsonl --requests 200 --rates 1,2,4 --max-prompt-tokens 4096
    python -m benchmarks.serving --presets --rates 1,2,4,8 --slo-ttft-ms 500 --slo-tpot-ms 50 --out presets.json
    python -m benchmarks.serving --presets latency --rate 2 -- --model DIR --dtype bfloat16

Requests are sent at their times whatever is still running: a Poisson process, or a trace of Mooncake's or Azure's,
whose shared prompt blocks are shared here too. Prompts are random tokens; answers have exactly the asked-for number of
tokens, greedy and blind to end tokens. They go over jaxserve.v1 (--address), or with --protocol openai over HTTP
(--url; the vocabulary is asked of AdminService, unless --vocab-size says it). benchmarks.latency says what is measured.

The load generator itself has limits: how late it sent requests is measured and reported, with a warning when that
would spoil the figures. Prompts of different points never share a cached prefix. With --presets, servers of our own
(python -m jaxserve.serve, flags after --) are started one after the other, each measured at all rates, and ended
whatever happens. After Ctrl-C, what was measured so far is reported. The server names the device: a generator that
asked for it would take its memory.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.arrivals import Arrival, Prompts, mean_gap
from benchmarks.device import versions
from benchmarks.latency import Objective, summarize
from benchmarks.load_clients import Caller
from benchmarks.open_loop import OpenLoop, lateness
from benchmarks.serving_flags import arrivals_of, check, parser, presets_of
from benchmarks.serving_report import Point, Report
from benchmarks.serving_target import Target, caller_of, target
from jaxserve.errors import ConfigError, JaxserveError

BAD_INPUT, INTERRUPTED = 2, 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REFRESHES = 2  # of the progress bar, per second: each one holds up the event loop


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0; 2 for what cannot be done, with one line on standard error; 130 when it was interrupted."""
    args = parser((__doc__ or "").splitlines()[0]).parse_args(arguments)
    try:
        check(args)
        plans, cut = arrivals_of(args)
        report = Report(account(args), Objective(args.slo_ttft_ms, args.slo_tpot_ms), args.out, Console())
        try:
            asyncio.run(stoppable(args, plans, cut, report))
        finally:
            report.close()
    except JaxserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except asyncio.CancelledError:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def account(args: argparse.Namespace) -> dict[str, Any]:
    """Of our software, and of what was asked for; servers tell about themselves."""
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    return versions() | {"asked": asked, "servers": {}}


async def stoppable(args: argparse.Namespace, plans: Sequence[Sequence[Arrival]], cut: int, report: Report) -> None:
    """`measure`, which a signal cancels."""
    task = asyncio.create_task(measure(args, plans, cut, report))
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await task


async def measure(args: argparse.Namespace, plans: Sequence[Sequence[Arrival]], cut: int, report: Report) -> None:
    """Every plan on every server. cut: how many requests of each plan were capped. report: has what was measured, even
    when this is cancelled or fails."""
    for preset in presets_of(args) or [""]:
        async with target(args, preset, report.console) as server:
            report.account["servers"][server.name] = server.about
            for plan in plans:
                server.check_fits(plan)
            prompts = Prompts(server.vocab_size, server.end_ids, args.seed)
            async with caller_of(args.protocol, server, max(map(len, plans))) as caller:
                await warm_up(caller, prompts, plans[0][: args.warm_up])
                for plan in plans:
                    await measure_point(server, OpenLoop(caller, prompts), plan, cut, report)
            report.compiled(server.name, await server.compiles_after_ready())


async def warm_up(caller: Caller, prompts: Prompts, arrivals: Sequence[Arrival]) -> None:
    """All at once, thrown away. ConfigError when each of them fails: so would the others."""
    loop = OpenLoop(caller, prompts)
    await loop.run([replace(a, due=0.0) for a in arrivals])
    if loop.outcomes and not any(o.ok for o in loop.outcomes):
        failed = loop.outcomes[0]
        raise ConfigError(f"no request of the warm-up was answered: {failed.status}: {failed.error}")


async def measure_point(server: Target, loop: OpenLoop, plan: Sequence[Arrival], cut: int, report: Report) -> None:
    try:
        with progress(report.console, loop, f"{server.name} {rate_of(plan):.3g}/s", len(plan)):
            await loop.run(plan)
    finally:
        if loop.outcomes:
            report.add(point_of(server.name, loop, plan, cut, report.objective))


def point_of(server: str, loop: OpenLoop, plan: Sequence[Arrival], cut: int, objective: Objective) -> Point:
    summary = summarize(loop.outcomes, objective)
    interrupted = summary.requests - summary.unfinished < len(plan)
    late = lateness(summary.lag, plan)
    return Point(server, round(rate_of(plan), 4), cut, loop.peak_in_flight, interrupted, late, summary)


def rate_of(plan: Sequence[Arrival]) -> float:
    """Requests/s on average; 0 when there is none to speak of."""
    gap = mean_gap(plan)
    return 1 / gap if gap else 0.0


@contextmanager
def progress(console: Console, loop: OpenLoop, title: str, total: int) -> Iterator[None]:
    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, refresh_per_second=REFRESHES
    ) as bar:
        task = bar.add_task("", total=total)

        def changed(loop: OpenLoop) -> None:
            done = len(loop.outcomes) - loop.in_flight
            bar.update(task, completed=done, description=f"{loop.in_flight} in flight")

        loop.changed = changed
        yield


if __name__ == "__main__":
    sys.exit(main())
