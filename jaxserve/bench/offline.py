"""bench offline: tokens per second of an engine without a server, as llama-bench has them.

B sequences are submitted at once, with random prompts that share nothing:

- ppN: prompts of N tokens, until each has its first token; B N tokens count;
- tgN: N tokens each after a prompt of one token; B N tokens count;
- ppN+tgM: M tokens each after prompts of N; B (N + M) tokens count.

Answers are greedy and blind to end tokens. Everything is compiled before; each test is run once
before it is timed.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxserve.bench.environment import environment, footnote
from jaxserve.bench.flags import OfflineOptions, StartupOptions
from jaxserve.bench.offline_cases import Case, cases_of, check_room, engine_of
from jaxserve.bench.output import Grid, as_json, comma_separated, deviation, markdown, spread
from jaxserve.checkpoints.hub.names import display_name
from jaxserve.compilation_cache import use_compilation_cache
from jaxserve.config import EngineOptions
from jaxserve.engine.engine import Engine
from jaxserve.errors import EngineError, JaxserveError
from jaxserve.interrupts import HeldInterrupts, interrupts_raise
from jaxserve.llm import LLM
from jaxserve.models.quant import scheme_in
from jaxserve.progress import Bar
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.mesh import MeshSpec, device_kind
from jaxserve.sharding.params import stored_bytes

GIB = 2**30


@dataclass(frozen=True)
class Result:
    """Measurements of a case; seconds of each repetition."""

    case: Case
    seconds: list[float]

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each repetition."""
        return [self.case.batch * self.case.counted / seconds for seconds in self.seconds]

    def to_json(self) -> dict[str, Any]:
        rates = self.rates
        mean = {
            "tokens_per_second": float(np.mean(rates)),
            "tokens_per_second_stddev": deviation(rates),
        }
        return asdict(self.case) | mean | {"seconds": self.seconds}


def bench_offline(options: OfflineOptions) -> int:
    """Measure all cases and print the results."""
    cases = cases_of(options)
    found = environment(options.command_line)
    engine = engine_of(options, cases)
    console = Console(stderr=True, highlight=False)
    results: list[Result] = []
    use_compilation_cache(options.engine.compilation_cache)
    with open_llm(options, engine, console) as llm:
        for case in cases:
            check_room(case, llm.runner.config)
        compile_for(llm, cases, console)
        try:
            with (
                interrupts_raise(),
                HeldInterrupts() as interrupts,
                Bar(console, "measuring") as bar,
            ):
                for result in measured(llm, cases, options, bar, interrupts):
                    results.append(result)
        finally:  # after Ctrl-C too
            if results:
                print(text(options.output, results, about(llm, options), found), end="")
    return 0


def open_llm(
    options: OfflineOptions | StartupOptions, engine: EngineOptions, console: Console
) -> LLM:
    """Load the model of the options; JaxserveError for a model that embeds."""
    asked = options.engine
    with Bar(console, "loading", in_bytes=True) as bar:
        llm = LLM(
            options.model,
            dtype=asked.dtype,
            weights=asked.weights,
            product=asked.product,
            options=engine,
            mesh=MeshSpec(**asked.axes),
            on_load=bar.update,
            compilation_cache=None,  # the command has chosen one
        )
    try:
        llm.prompts.check_purpose(embed=False)
    except JaxserveError:
        llm.close()
        raise
    return llm


def compile_for(llm: LLM, cases: Sequence[Case], console: Console) -> None:
    """Compile the steps that the cases need."""
    plan = llm.runner.buckets
    config = llm.runner.config
    buckets = set()
    for case in cases:
        lengths = [(case.prompt, case.output)] * case.batch
        buckets |= set(plan.reachable(lengths, config=config, score=False))
    with Bar(console, "compiling") as bar:
        llm.runner.warm_up(sorted(buckets), bar.update)


def measured(
    llm: LLM, cases: Sequence[Case], options: OfflineOptions, bar: Bar, interrupts: HeldInterrupts
) -> Iterator[Result]:
    """Run each case once to warm up, then measure the repetitions.

    Args:
        interrupts: Held interrupts, which are passed on between two steps.

    Raises:
        EngineError: A step was compiled meanwhile.
    """
    rng = np.random.default_rng(options.seed)
    runs = options.repetitions + 1
    total = len(cases) * runs
    tokens = np.setdiff1d(np.arange(llm.model.spec.vocab_size), llm.model.eos_ids)
    for place, case in enumerate(cases):
        seconds: list[float] = []
        for number in range(runs):
            bar.update(place * runs + number, total, f"{case.test} x {case.batch}")
            prompts = rng.choice(tokens, (case.batch, case.prompt)).tolist()
            lengths = [case.output] * case.batch
            seconds.append(timed(llm.engine, prompts, lengths, interrupts))
        if compiles := llm.runner.compiles_after_ready:
            raise EngineError(
                f"{case.test}: {compiles} compiles while it was measured: the figures would be "
                f"wrong"
            )
        yield Result(case, seconds[1:])
    bar.update(total, total, "")


def timed(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    interrupts: HeldInterrupts,
) -> float:
    """Return the seconds that prompts take which are submitted at once.

    Each answer is greedy, blind to end tokens, and has exactly its length; otherwise EngineError is
    raised.
    """
    began = time.perf_counter()
    made = 0
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        engine.submit(Request(id=str(number), prompt=tuple(prompt), params=params))
    while engine.has_work:
        interrupts.pass_on()
        made += sum(len(event.tokens) for event in engine.step())
    seconds = time.perf_counter() - began
    if made != sum(lengths):
        raise EngineError(f"{made} tokens were made instead of {sum(lengths)}")
    return seconds


def about(llm: LLM, options: OfflineOptions | StartupOptions) -> dict[str, Any]:
    """Return facts about model and engine.

    `bytes` is that of all parameters, each counted once however many devices hold it.
    """
    model = llm.model
    config = llm.runner.config
    return {
        "model": display_name(options.model),
        "parameters": model.parameters,
        "bytes": sum(
            stored_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(model.params)
        ),
        "dtype": str(scheme_in(model.params) or model.params["embed"].dtype),
        "product": model.product_text,
        "device": device_kind(model.mesh),
        "mesh": str(MeshSpec(**options.engine.axes)),
        "engine": asdict(config),
    }


def text(
    output: str, results: Sequence[Result], about: dict[str, Any], found: dict[str, Any]
) -> str:
    """Return the results as md, csv or json."""
    rows = [result.to_json() for result in results]
    if output == "json":
        return as_json("offline", about, rows, found)
    if output == "csv":
        names = ("model", "parameters", "bytes", "dtype", "device", "mesh")
        shared = {name: about[name] for name in names} | {"jax": found["jax"]}
        return comma_separated([shared | row for row in rows])
    return f"{markdown(grid(results, about, found['jax']))}\n{footnote(found, about['device'])}\n"


def grid(results: Sequence[Result], about: dict[str, Any], jax_version: str) -> Grid:
    """Return the table of results."""
    model = [
        about["model"],
        f"{about['parameters'] / 1e6:,.1f} M",
        f"{about['bytes'] / GIB:.3f} GiB",
        about["dtype"],
        about["device"],
        about["mesh"],
        jax_version,
    ]
    rows = [[*model, str(r.case.batch), r.case.test, spread(r.rates)] for r in results]
    return Grid(
        ("model", "params", "size", "dtype", "device", "mesh", "jax", "batch", "test", "tokens/s"),
        rows,
        left=9,
    )
