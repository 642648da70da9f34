"""Gain of speculation by batch size: plain decodes beside --speculate ngram and draft.

Question: what do drafts bring, and where do they stop paying?

    python -m benchmarks.speculation [--streams 1 --streams 4 ...] [--runs 5] [--tokens 128] [--out
    FILE] python -m benchmarks.speculation --shape llama3.1-8b --layers 8 --agreement 0.8 [...]

The bundled pair tells stories, greedily, `streams` at a time; or a shape with random weights says
what it says, and a drafter that knows it proposes that, with a wrong token now and then
(--agreement: how many are right). The engines of a batch take turns, a run each, and the median run
counts; a speed-up is a ratio of two of the same turn.

floor: what a plain decode step would take if memory did nothing but read what it needs. a step:
tokens of a row in a step that decodes or verifies. k: drafts that these steps were compiled for, in
the mean. cycle: what they cost, in plain steps, as the engine measured it. formula: tokens of a
step over the cost of a cycle. With --out, JSON goes there after every batch, a picture beside it as
.svg.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks.device import about, measure_limits
from benchmarks.models import NAMES, spec_of
from jaxserve import LLM
from jaxserve.config import EngineOptions
from jaxserve.engine.build import build_engine
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.engine.events import TokenEvent
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.host.speculation import Costs, Speculation
from jaxserve.engine.step_costs import measure
from jaxserve.models.decoder import param_specs
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.plot import Chart, Line, picture
from jaxserve.plan.roofline import Case, work_of
from jaxserve.plan.topology import Limits
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.sharding.params import random_params

BUNDLED = Path(__file__).parents[1] / "checkpoints" / "bundled"
SUBJECTS = (
    "a fox",
    "a lost ball",
    "a girl named Lily",
    "a picnic",
    "a dragon and a key",
    "sharing",
    "a birthday",
    "a cat",
)
type Prompts = list[tuple[int, ...]]
type Said = dict[str, list[int]]  # tokens by request


@dataclass(frozen=True)
class Run:
    """One run of an engine; launches: of decodes and verifications, by compiled drafts."""

    seconds: float
    tokens: int
    drafted: int
    accepted: int
    launches: dict[int, int]

    @property
    def steps(self) -> int:
        return sum(self.launches.values())


@dataclass(frozen=True)
class Result:
    """Figures of a batch.

    milliseconds: of a token of one stream. floor: of a plain step. formula, speed_up: beside plain
    decodes.
    """

    streams: int
    drafter: str
    milliseconds: float
    floor: float
    tokens_a_step: float
    k: float
    accepted: float
    cycle: float
    formula: float
    speed_up: float


class Side:
    """An engine with all its steps compiled."""

    def __init__(self, name: str, engine: Engine, runner: DeviceRunner):
        self.name = name
        self.engine = engine
        self.runner = runner
        self._runs = 0

    @property
    def costs(self) -> Costs | None:
        speculation = self.engine.scheduler.speculation
        return speculation.costs if speculation else None

    def run(self, prompts: Prompts, tokens: int) -> tuple[Run, Said]:
        self._runs += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        requests = [
            Request(id=f"{self._runs}.{i}", prompt=prompt, params=sampling)
            for i, prompt in enumerate(prompts)
        ]
        before = self._launches()
        began = time.perf_counter()
        events = list(self._events(requests))
        seconds = time.perf_counter() - began
        launches = {k: count - before.get(k, 0) for k, count in self._launches().items()}
        said: Said = {str(i): [] for i in range(len(prompts))}
        for event in events:
            said[event.request_id.split(".")[1]] += event.tokens
        times = [event.times for event in events if event.finish and event.times]
        drafted = sum(t.drafted for t in times)
        accepted = sum(t.accepted for t in times)
        return Run(seconds, sum(map(len, said.values())), drafted, accepted, launches), said

    def _events(self, requests: list[Request]) -> Iterator[TokenEvent]:
        for request in requests:
            self.engine.submit(request)
        while self.engine.has_work:
            yield from self.engine.step()

    def _launches(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for bucket, padding in self.runner.padding.items():
            if bucket.kind in ("decode", "verify"):
                found[bucket.drafts] = found.get(bucket.drafts, 0) + padding.launches
        return found


def options_for(streams: int, tokens: int, speculate: str) -> EngineOptions:
    return EngineOptions(
        max_batch=streams,
        step_tokens=max(256, 8 * streams),
        decode_steps=1,
        max_context=tokens + 64,
        speculate=speculate,
        prefix_cache=False,
    )


# ---- the bundled pair


def bundled(streams: int, tokens: int) -> tuple[list[Side], Prompts, ModelSpec, jnp.dtype]:
    sides = []
    llms = []
    for name in ("off", "ngram", "draft"):
        draft = BUNDLED / "tiny-chat-draft" if name == "draft" else None
        options = options_for(streams, tokens, name)
        llm = LLM(BUNDLED / "tiny-chat", dtype="float32", options=options, draft_model=draft)
        llm.warm_up()
        llms.append(llm)
        sides.append(Side(name, llm.engine, llm.runner))
    stories = [f"Tell me a story about {SUBJECTS[i % len(SUBJECTS)]}." for i in range(streams)]
    chats = [llms[0].prepare([{"role": "user", "content": story}]) for story in stories]
    spec = llms[0].model.spec
    params = llms[0].model.params
    return sides, [chat.request.prompt for chat in chats], spec, params["embed"].dtype


# ---- a shape with random weights, and a drafter that knows what it says


class Knowing:
    """An engine.speculation.Proposer that knows the right tokens.

    Each token is spoilt with a chance of 1 - agreement.
    """

    waits = True
    has_pages = False

    def __init__(self, agreement: float, most: int):
        self.said: Said = {}
        self._agreement = agreement
        self._most = most
        self._draw = random.Random(0)

    def takes(self, request: Request) -> bool:
        return True

    def propose(self, seq: Sequence) -> list[int]:
        right = self.said[seq.request.id.split(".")[1]][len(seq.tokens) - seq.prompt_len :]
        return [
            token if self._draw.random() < self._agreement else token ^ 1
            for token in right[: self._most]
        ]

    def forget(self, seq: Sequence) -> None:
        pass


def of_shape(
    spec: ModelSpec, params: dict, streams: int, tokens: int, agreement: float
) -> tuple[list[Side], Prompts]:
    """Return a shape's plain engine, and one with a drafter.

    The drafter knows what the first engine says after these prompts.
    """
    mesh = MeshSpec().build(jax.devices())
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(1000) for _ in range(32)) for _ in range(streams)]
    sides = []
    for name in ("off", "ngram"):
        engine, runner = build_engine(spec, params, mesh, options_for(streams, tokens, name), "")
        runner.warm_up(runner.buckets.buckets)
        sides.append(Side(name, engine, runner))
    config = sides[1].runner.config
    knowing = Knowing(agreement, config.draft_tokens)
    knowing.said = sides[0].run(prompts, tokens)[1]
    costs = measure(
        sides[1].runner, sides[1].runner.compiled, config.lanes, no_row=config.max_batch
    )
    sides[1].engine.scheduler.speculation = Speculation(knowing, config.draft_tokens, costs)
    sides[1].name = f"{agreement:.0%} right"
    return sides, prompts


# ---- measuring


def in_turns(sides: list[Side], prompts: Prompts, tokens: int, runs: int) -> dict[str, list[Run]]:
    """Run the engines in turns; the first turn, which fills the machine's caches, does not count.

    Every engine has to say the same.
    """
    found: dict[str, list[Run]] = {side.name: [] for side in sides}
    for turn in range(1 + runs):
        answers = []
        for side in sides:
            run, said = side.run(prompts, tokens)
            answers.append(said)
            if turn:
                found[side.name].append(run)
        if different := [
            side.name for side, said in zip(sides, answers, strict=True) if said != answers[0]
        ]:
            print(
                f"not the tokens of plain decodes, where two were a hair apart: "
                f"{', '.join(different)}"
            )
    return found


def result(side: Side, runs: list[Run], plain: list[Run], streams: int, floor: float) -> Result:
    run = sorted(runs, key=lambda r: r.seconds)[len(runs) // 2]
    drafts = {k: count for k, count in run.launches.items() if count}
    cycle = 1.0
    if side.costs:
        spent = sum(count * side.costs.of(streams, k) for k, count in drafts.items())
        cycle = spent / (run.steps * side.costs.of(streams, 0))
    a_step = run.tokens / streams / run.steps
    return Result(
        streams=streams,
        drafter=side.name,
        milliseconds=round(run.seconds * 1e3 * streams / run.tokens, 3),
        floor=round(floor * 1e3, 3),
        tokens_a_step=round(a_step, 2),
        k=round(sum(k * count for k, count in drafts.items()) / run.steps, 2),
        accepted=round(run.accepted / run.drafted, 3) if run.drafted else 0.0,
        cycle=round(cycle, 2),
        formula=round(a_step / cycle, 2),
        speed_up=round(
            statistics.median(p.seconds / r.seconds for p, r in zip(plain, runs, strict=True)), 2
        ),
    )


def floor_of(spec: ModelSpec, dtype: jnp.dtype, streams: int, tokens: int, limits: Limits) -> float:
    """Return the seconds of a plain decode step, its rows half-way."""
    return work_of(spec, dtype, Case("decode", streams, 32 + tokens // 2, streams)).floor(limits)


def show(results: list[Result], limits: Limits) -> None:
    title = f"greedy; ms: of a token of one stream; memory {limits.bandwidth / 1e9:.1f} GB/s"
    columns = (
        "streams",
        "drafts",
        "ms",
        "floor",
        "a step",
        "k",
        "right",
        "cycle",
        "formula",
        "speed-up",
    )
    table = Table(*columns, title=title)
    for r in results:
        numbers = (
            f"{r.milliseconds:.2f}",
            f"{r.floor:.2f}",
            f"{r.tokens_a_step:.2f}",
            f"{r.k:.2f}",
        )
        ratios = (f"{r.accepted:.0%}", f"{r.cycle:.2f}", f"{r.formula:.2f}", f"{r.speed_up:.2f}")
        table.add_row(str(r.streams), r.drafter, *numbers, *ratios)
    Console().print(table)


def charts(results: list[Result]) -> list[Chart]:
    drafters = dict.fromkeys(r.drafter for r in results if r.drafter != "off")

    def lines(value: Callable[[Result], float]) -> list[Line]:
        return [
            Line(d, d, [(r.streams, value(r)) for r in results if r.drafter == d]) for d in drafters
        ]

    return [
        Chart(
            "tokens that a step computes of a row: 1 + k",
            "streams",
            "tokens",
            lines(lambda r: 1 + r.k),
        ),
        Chart("speed-up over plain decodes", "streams", "times", lines(lambda r: r.speed_up)),
    ]


def write(path: Path, results: list[Result], facts: Mapping[str, object]) -> None:
    path.write_text(json.dumps({**facts, "results": [asdict(r) for r in results]}, indent=1) + "\n")
    path.with_suffix(".svg").write_text(picture(charts(results)))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speculation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--streams", type=int, action="append", metavar="N")
    parser.add_argument("--runs", type=int, default=5, metavar="N")
    parser.add_argument("--tokens", type=int, default=128, metavar="N")
    parser.add_argument("--shape", choices=NAMES)
    parser.add_argument("--layers", type=int, metavar="N")
    parser.add_argument("--agreement", type=float, default=0.8, metavar="SHARE")
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args()
    dtype = jnp.dtype("bfloat16" if args.shape else "float32")
    limits = measure_limits(dtype)
    results = list[Result]()
    spec = spec_of(args.shape, args.layers) if args.shape else None
    params = (
        random_params(param_specs(spec, dtype), MeshSpec().build(jax.devices())) if spec else {}
    )
    for streams in args.streams or [1, 4, 16, 64]:
        if spec:
            sides, prompts = of_shape(spec, params, streams, args.tokens, args.agreement)
            known = spec
        else:
            sides, prompts, known, dtype = bundled(streams, args.tokens)
        found = in_turns(sides, prompts, args.tokens, args.runs)
        floor = floor_of(known, dtype, streams, args.tokens, limits)
        results += [result(side, found[side.name], found["off"], streams, floor) for side in sides]
        for side in sides:
            side.runner.release_state()
        if args.out:
            write(
                args.out,
                results,
                {**about(), "shape": args.shape or "tiny-chat", "bandwidth": limits.bandwidth},
            )
    show(results, limits)


if __name__ == "__main__":
    main()
