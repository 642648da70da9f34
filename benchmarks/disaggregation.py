"""Effect of disaggregation on streams beside long prompts: three ways to use two cores.

Question: do long prompts delay other requests' streams less when another server computes them?

    python -m benchmarks.disaggregation [--trace FILE] [--rate 0 --rate 1 ...] [--seconds 30]
    [--json] [--out FILE]

- disaggregated: a prefill server on one core, and a decode server on the other, which every request
  goes to;
- chunked: two servers that do both, one on each core; requests are dealt out in turn; a step has
  --step-tokens at most;
- neither: the same two, with steps as long as the context, so that a prompt is computed in one
  step. (This engine cannot do without chunks altogether: of two prompts that come together, the
  second may be cut.)

Short prompts come evenly, --short of them a second, and stream 64 tokens each. Beside them come
long ones, the lengths and shared prefixes of Mooncake's trace times --token-scale (1/8: its blocks
of 512 tokens become pages of 64), cut to the context. Its times are rounded to three seconds, ten
requests at a time, so here they come as a Poisson process, --rate of them a second. Servers are
pinned to their cores; so is this load generator, to the other ones: where there are none, it takes
a share of the servers' two. The servers of all arrangements run, and take turns under each load.

ITL and TTFT are those of the short ones, TTFT of the long ones apart, in milliseconds, at the
client; longest gap is that between two tokens of a short stream, one of each stream: a stall that
p99 of ITL is too coarse for. Tokens/s are those of all outputs. What the decode server says of its
handovers stands behind: prompts that travelled, those that failed and were computed there, MiB of
pages, and seconds of a trip in the mean. With --out, JSON goes there after every load, a picture
beside it as .svg. --json: the same on standard output, instead of the table.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import uvloop
from grpc import aio  # type: ignore[attr-defined]
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from benchmarks.device import versions
from jaxserve.bench.arrivals import Arrival, Lengths, Process, capped, drawn, due_times, resized
from jaxserve.bench.caller import Caller
from jaxserve.bench.environment import IDLE, environment
from jaxserve.bench.grpc_caller import GrpcCaller
from jaxserve.bench.latency import Objective, Spread, Summary, summarize
from jaxserve.bench.loops import Loop
from jaxserve.bench.own_server import HOST, free_ports, running, serve_command
from jaxserve.bench.prompts import RandomPrompts
from jaxserve.bench.traces import read_trace
from jaxserve.cli.flags import BUNDLED
from jaxserve.client import AsyncClient, ModelInfo
from jaxserve.errors import JaxserveError
from jaxserve.plan.plot import Chart, Line, picture
from jaxserve.server.disaggregation.metrics import NAME

TRACE = Path(
    "traces/mooncake/conversation_trace.jsonl"
)  # in the folder that JAXSERVE_TEST_DATA names
ARRANGEMENTS = ("disaggregated", "chunked", "neither")
SHORT_PROMPT = Lengths(32, 96)
SHORT_OUTPUT = Lengths(64, 64)
MOST_LONG_OUTPUT = 64
READY_SECONDS = 1800.0
TIMEOUT = 600.0
WORTH = 0.9  # of p99 ITL with chunks alone: what is nearer is noise
SEED = 0
CHANNEL = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
type Counts = Counter[tuple[str, ...]]  # samples by name and labels


@dataclass(frozen=True)
class Load:
    """A load of requests; rate: of long prompts, per second."""

    rate: float
    short: list[Arrival]
    long: list[Arrival]


@dataclass(frozen=True)
class Handovers:
    """Counts of a decode server under a load: prompts by decision, failures by reason.

    seconds: of a trip.
    """

    decisions: dict[str, int]
    failures: dict[str, int]
    mebibytes: float
    seconds: float | None


@dataclass(frozen=True)
class Result:
    """Figures of an arrangement under a load.

    rate: of long prompts, per second. gaps: the longest of each short stream. all: of both kinds.
    handovers: None without a decode server.
    """

    arrangement: str
    rate: float
    short: Summary
    gaps: Spread | None
    long: Summary
    all: Summary
    handovers: Handovers | None


# ---- what is asked


def context_of(model: Path) -> int:
    """Return the context in tokens."""
    return json.loads((model / "config.json").read_text())["max_position_embeddings"]


def loads_of(args: argparse.Namespace, context: int) -> list[Load]:
    """Return a load for each rate, the same for every arrangement."""
    trace = resized(read_trace(args.trace, None), args.token_scale)
    trace, _ = capped(trace, context - MOST_LONG_OUTPUT, MOST_LONG_OUTPUT)
    return [
        Load(rate, short_ones(args), long_ones(trace, rate, args.seconds)) for rate in args.rate
    ]


def short_ones(args: argparse.Namespace) -> list[Arrival]:
    due = due_times(Process("constant", args.short).gaps(SEED), None, args.seconds)
    return drawn(due, SHORT_PROMPT, SHORT_OUTPUT, SEED)


def long_ones(trace: Sequence[Arrival], rate: float, seconds: float) -> list[Arrival]:
    """Return the first requests of the trace, at times of a Poisson process."""
    if not rate:
        return []
    due = due_times(Process("poisson", rate).gaps(SEED), None, seconds)
    return [replace(arrival, due=at) for arrival, at in zip(trace, due, strict=False)]


# ---- who is asked


@dataclass(frozen=True)
class Servers:
    """Running servers; addresses: gRPC, called in turn; metrics: URL of the decode server's."""

    addresses: list[str]
    metrics: str | None

    async def counts(self) -> Counts:
        return (
            metrics_of(await asyncio.to_thread(read, self.metrics)) if self.metrics else Counter()
        )


def read(url: str) -> str:
    with urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def metrics_of(text: str) -> Counts:
    """Return the metrics of disaggregation, by name without prefix and by label values."""
    families = text_string_to_metric_families(text)
    samples = (
        sample for family in families for sample in family.samples if sample.name.startswith(NAME)
    )
    return Counter({(s.name.removeprefix(NAME), *s.labels.values()): s.value for s in samples})


def handovers(before: Counts, after: Counts) -> Handovers:
    came = after - before

    def by_label(name: str) -> dict[str, int]:
        return {key[1]: round(value) for key, value in came.items() if key[0] == name}

    trips = came["seconds_count",]
    return Handovers(
        decisions=by_label("decisions_total"),
        failures=by_label("failures_total"),
        mebibytes=round(came["received_bytes_total",] / 2**20, 2),
        seconds=round(came["seconds_sum",] / trips, 4) if trips else None,
    )


def flags_of(
    arrangement: str, args: argparse.Namespace, context: int, first: str
) -> tuple[list[str], list[str]]:
    """Return the flags of the two servers; first: gRPC address of the first one."""
    tokens = context if arrangement == "neither" else args.step_tokens
    both = ["--model", str(args.model), "--step-tokens", str(tokens)]
    if arrangement != "disaggregated":
        return both, both
    decodes = [
        "--role",
        "decode",
        "--prefill-server",
        first,
        "--prefill-threshold",
        str(args.threshold),
    ]
    return [*both, "--role", "prefill"], [*both, *decodes]


@asynccontextmanager
async def started(
    arrangement: str, args: argparse.Namespace, context: int
) -> AsyncIterator[Servers]:
    """Both servers, each on a core of its own, ready."""
    ports = free_ports(4)
    grpc = ports[:2]
    http = ports[2:]
    addresses = [f"{HOST}:{port}" for port in grpc]
    flags = flags_of(arrangement, args, context, addresses[0])
    async with AsyncExitStack() as stack:
        for i, core in enumerate(args.cores):
            command = [
                "taskset",
                "--cpu-list",
                str(core),
                *serve_command(grpc[i], http[i], flags[i]),
            ]
            await stack.enter_async_context(running(command, addresses[i], READY_SECONDS))
        if arrangement != "disaggregated":
            yield Servers(addresses, None)
            return
        servers = Servers(addresses[1:], f"http://{HOST}:{http[1]}/metrics")
        async with asyncio.timeout(READY_SECONDS):
            while not (await servers.counts())["prefill_servers", "ready"]:
                await asyncio.sleep(0.1)
        yield servers


@asynccontextmanager
async def calling(addresses: Sequence[str]) -> AsyncIterator[Caller]:
    """Each request is sent to the next of them."""
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(aio.insecure_channel(a, options=CHANNEL))
            for a in addresses
        ]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        yield GrpcCaller(channels, None, ignore_eos=True)


# ---- measuring


class Bench:
    """An arrangement under loads, one after the other."""

    def __init__(self, arrangement: str, servers: Servers, caller: Caller, model: ModelInfo):
        self._arrangement = arrangement
        self._servers = servers
        self._caller = caller
        self._model = model
        self._runs = 0

    async def run(self, load: Load) -> Result:
        before = await self._servers.counts()
        short = self._loop()
        long = self._loop()
        await asyncio.gather(short.open(load.short), long.open(load.long))
        after = await self._servers.counts()
        return Result(
            arrangement=self._arrangement,
            rate=load.rate,
            short=summarize(short.outcomes, Objective()),
            gaps=Spread.of(max(outcome.itl()) for outcome in short.outcomes if outcome.ok),
            long=summarize(long.outcomes, Objective()),
            all=summarize([*short.outcomes, *long.outcomes], Objective()),
            handovers=handovers(before, after) if self._servers.metrics else None,
        )

    def _loop(self) -> Loop:
        """Return a loop whose prompts, and so whose pages, are those of no other run."""
        self._runs += 1
        return Loop(
            self._caller,
            RandomPrompts(self._model.vocab_size, self._model.eos_token_ids, SEED, self._runs),
            TIMEOUT,
        )


@asynccontextmanager
async def opened(arrangement: str, args: argparse.Namespace, context: int) -> AsyncIterator[Bench]:
    async with started(arrangement, args, context) as servers, calling(servers.addresses) as caller:
        async with AsyncClient(servers.addresses[0]) as client:
            model = await client.model_info()
        yield Bench(arrangement, servers, caller, model)


async def measure(args: argparse.Namespace) -> AsyncIterator[Result]:
    """Every load, by every arrangement in turn, after a few requests that do not count."""
    context = context_of(args.model)
    loads = loads_of(args, context)
    async with AsyncExitStack() as stack:
        found = args.arrangement or ARRANGEMENTS
        benches = [await stack.enter_async_context(opened(name, args, context)) for name in found]
        for bench in benches:
            await bench.run(warm_up(loads))
        for load in loads:
            for bench in benches:
                yield await bench.run(load)


def warm_up(loads: Sequence[Load]) -> Load:
    """Return a load of a few requests of both kinds, all at once."""
    most = max(loads, key=lambda load: load.rate)
    return Load(
        most.rate,
        *([replace(arrival, due=0.0) for arrival in kind[:4]] for kind in (most.short, most.long)),
    )


# ---- what is told


def verdicts(results: Sequence[Result]) -> Iterator[str]:
    """Return a verdict for each rate."""
    found = {(r.rate, r.arrangement): r for r in results}
    for rate in dict.fromkeys(r.rate for r in results):
        apart = found.get((rate, "disaggregated"))
        beside = found.get((rate, "chunked"))
        if apart and beside:
            yield f"{rate:g} long prompts/s: {verdict(apart, beside)}"


def verdict(apart: Result, beside: Result) -> str:
    """Return a sentence that says whether disaggregation pays, against chunks alone.

    It pays where p99 of ITL is a tenth shorter, and the median no longer.
    """
    itl = p99(apart.short.itl) / p99(beside.short.itl)
    median = p50(apart.short.itl) / p50(beside.short.itl)
    figures = {
        "p99 ITL": itl,
        "p50 ITL": median,
        "longest gaps": p99(apart.gaps) / p99(beside.gaps),
        "p99 TTFT": p99(apart.short.ttft) / p99(beside.short.ttft),
        "tokens/s": apart.all.output_tokens_per_second / beside.all.output_tokens_per_second,
    }
    travelled = apart.handovers and apart.handovers.decisions.get("remote")
    worth = itl < WORTH and median <= 1 / WORTH
    pays = ("pays" if worth else "does not pay") if travelled else "has nothing to do"
    return (
        f"disaggregation {pays}: "
        f"{', '.join(f'{name} x {value:.2f}' for name, value in figures.items())}"
    )


def p50(spread: Spread | None) -> float:
    return spread.p50 if spread else float("nan")


def p99(spread: Spread | None) -> float:
    return spread.p99 if spread else float("nan")


def show(results: Sequence[Result], console: Console) -> None:
    latencies = (
        "ITL p50",
        "p99",
        "longest gap p50",
        "p99",
        "TTFT p50",
        "p99",
        "long TTFT p50",
        "p99",
    )
    columns = ("long/s", "", *latencies, "tokens/s", "errors", "travelled", "failed", "MiB", "s")
    table = Table(*columns, title="milliseconds at the client")
    for r in results:
        spreads = (r.short.itl, r.gaps, r.short.ttft, r.long.ttft)
        cells = [text for spread in spreads for text in quantiles(spread)]
        cells += [
            f"{r.all.output_tokens_per_second:.0f}",
            str(r.all.requests - r.all.ok),
            *told(r.handovers),
        ]
        table.add_row(f"{r.rate:g}", r.arrangement, *cells)
    console.print(table)
    for line in verdicts(results):
        console.print(line)


def quantiles(spread: Spread | None) -> tuple[str, str]:
    return (f"{spread.p50:.1f}", f"{spread.p99:.1f}") if spread else ("", "")


def told(handovers: Handovers | None) -> tuple[str, str, str, str]:
    if not handovers:
        return "", "", "", ""
    seconds = "" if handovers.seconds is None else f"{handovers.seconds:.2f}"
    failed = sum(handovers.failures.values())
    return (
        str(handovers.decisions.get("remote", 0)),
        str(failed),
        f"{handovers.mebibytes:.1f}",
        seconds,
    )


def charts(results: Sequence[Result]) -> list[Chart]:
    """Return charts of p99 and p50 against the rate of long prompts."""

    def lines(of: Callable[[Result], Spread | None]) -> Iterator[Line]:
        for name in dict.fromkeys(r.arrangement for r in results):
            spreads = [
                (r.rate, spread) for r in results if r.arrangement == name and (spread := of(r))
            ]
            yield Line(f"{name} p99", name, [(rate, spread.p99) for rate, spread in spreads])
            yield Line(
                f"{name} p50", name, [(rate, spread.p50) for rate, spread in spreads], dashed=True
            )

    def chart(title: str, of: Callable[[Result], Spread | None]) -> Chart:
        return Chart(title, "long prompts/s", "ms", list(lines(of)))

    return [
        chart("inter-token latency of short streams", lambda r: r.short.itl),
        chart("longest gap of a short stream", lambda r: r.gaps),
        chart("time to first token of long prompts", lambda r: r.long.ttft),
    ]


def to_json(results: Sequence[Result], facts: dict[str, Any]) -> str:
    return json.dumps({**facts, "results": [asdict(r) for r in results]}, indent=1) + "\n"


def write(path: Path, results: Sequence[Result], facts: dict[str, Any]) -> None:
    path.write_text(to_json(results, facts))
    path.with_suffix(".svg").write_text(picture(charts(results)))


# ---- asking for it


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.disaggregation", description=(__doc__ or "").splitlines()[0]
    )
    p.add_argument(
        "--trace",
        type=Path,
        default=trace_found(),
        metavar="FILE",
        help=f"{TRACE}, as it was published",
    )
    p.add_argument(
        "--model", type=Path, default=BUNDLED, metavar="DIR", help="default: the bundled one"
    )
    p.add_argument(
        "--rate",
        type=float,
        action="append",
        metavar="R",
        help="of long prompts per second (0, 1, 2)",
    )
    p.add_argument(
        "--short", type=float, default=4.0, metavar="R", help="short prompts per second (4)"
    )
    p.add_argument("--seconds", type=float, default=30.0, metavar="S", help="of each load (30)")
    p.add_argument(
        "--token-scale",
        type=float,
        default=1 / 8,
        metavar="X",
        help="of the trace's lengths (0.125)",
    )
    p.add_argument(
        "--step-tokens", type=int, default=256, metavar="N", help="of a step, but for neither (256)"
    )
    p.add_argument(
        "--threshold", type=int, default=256, metavar="N", help="--prefill-threshold (256)"
    )
    p.add_argument(
        "--arrangement", choices=ARRANGEMENTS, action="append", help="default: all three"
    )
    p.add_argument("--json", action="store_true", help="on standard output")
    p.add_argument("--out", type=Path, metavar="FILE")
    return p


def trace_found() -> Path | None:
    data = os.environ.get("JAXSERVE_TEST_DATA")
    return Path(data) / TRACE if data else None


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments, with the cores of the two servers and of the load generator.

    Ends with exit status 2 where something is missing.
    """
    p = parser()
    args = p.parse_args(arguments)
    if args.trace is None:
        p.error(
            f"there is no trace: give --trace FILE, or JAXSERVE_TEST_DATA, a folder with {TRACE}"
        )
    if not args.trace.is_file():
        p.error(f"--trace {args.trace}: there is no such file (Mooncake's trace, FAST 2025)")
    if not shutil.which("taskset"):
        p.error("there is no taskset here, which gives each server a core of its own")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        p.error(f"two servers need a core each; there is {len(cores)}")
    args.rate = args.rate or [0.0, 1.0, 2.0]
    args.cores = cores[:2]
    args.others = cores[2:]
    return args


async def run(args: argparse.Namespace, facts: dict[str, Any], console: Console) -> list[Result]:
    results = list[Result]()
    async for result in measure(args):
        results.append(result)
        itl = " / ".join(quantiles(result.short.itl))
        console.print(
            f"{result.arrangement}, {result.rate:g} long prompts/s: ITL p50 / p99 {itl} ms"
        )
        if args.out:
            write(args.out, results, facts)
    return results


def main() -> None:
    args = parsed()
    about = environment(" ".join(["python -m benchmarks.disaggregation", *sys.argv[1:]]))
    facts = {
        **about,
        **versions(),
        "generator": "on other cores" if args.others else "on the servers' cores",
    }
    console = Console(stderr=True, highlight=False)
    if about["load_before"] > IDLE:
        console.print(f"NOT IDLE: load {about['load_before']} before")
    if args.others:
        os.sched_setaffinity(0, args.others)
    try:
        results = uvloop.run(run(args, facts, console))
    except JaxserveError as error:
        sys.exit(f"error: {error}")
    if args.json:
        print(to_json(results, facts), end="")
    else:
        show(results, Console(width=170))


if __name__ == "__main__":
    main()
