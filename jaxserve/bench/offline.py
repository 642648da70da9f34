"""bench offline: tokens per second of an engine without a server, as llama-bench has them.

B sequences are submitted at once, with random prompts that share nothing:

- ppN: prompts of N tokens, until each has its first token; B N tokens count;
- tgN: N tokens each after a prompt of one token; B N tokens count;
- ppN+tgM: M tokens each after prompts of N; B (N + M) tokens count.

Answers are greedy and blind to end tokens. Everything is compiled before; each test is run once
before it is timed.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np
from rich.console import Console

from checkpoints.errors import CheckpointError
from jaxserve.bench.checks import check_above, numbers
from jaxserve.bench.environment import environment, footnote
from jaxserve.bench.output import Grid, comma_separated, deviation, markdown, spread
from jaxserve.cli.compilation_cache import use_compilation_cache
from jaxserve.cli.flags import engine_options
from jaxserve.cli.output import Bar
from jaxserve.config import EngineConfig, EngineOptions
from jaxserve.engine.engine import Engine
from jaxserve.errors import ConfigError, EngineError, JaxserveError
from jaxserve.llm import LLM
from jaxserve.loading.spec import read_spec
from jaxserve.models.quant import scheme_in
from jaxserve.plan.model import read_config
from jaxserve.request import Request, SamplingParams
from jaxserve.tokenizer import TokenizerError
from pallas_kernels.dispatch import KernelError
from sharding.mesh import MeshSpec, device_kind
from sharding.params import stored_bytes
from sharding.rules import ShardingError

EXPECTED = (JaxserveError, CheckpointError, TokenizerError, ShardingError, KernelError)
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    test: its name. prompt, output: tokens of each sequence. counted: those of them that the rate
    counts.
    """

    test: str
    batch: int
    prompt: int
    output: int
    counted: int

    @property
    def context(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt + self.output


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


def bench_offline(args: argparse.Namespace) -> int:
    """Measure all cases and print the results."""
    check_above(args, 0, "repetitions")
    check_above(args, -1, "seed")
    cases = cases_of(args)
    found = environment(args.command_line)
    options = options_of(args, cases)
    console = Console(stderr=True, highlight=False)
    results: list[Result] = []
    use_compilation_cache(args.compilation_cache)
    with open_llm(args, options, console) as llm:
        for case in cases:
            check_room(case, llm.runner.config)
        compile_for(llm, cases, console)
        try:
            with Bar(console, "measuring") as bar:
                for result in measured(llm, cases, args, bar):
                    results.append(result)
        finally:  # after Ctrl-C too
            if results:
                print(text(args.output, results, about(llm, args), found), end="")
    return 0


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Return the cases that the flags ask for."""
    prompts = [n for n in numbers(args, "prompt_tokens", int, -1) if n]
    outputs = [n for n in numbers(args, "output_tokens", int, -1) if n]
    if not (prompts or outputs):
        raise ConfigError(
            "--prompt-tokens and --output-tokens are both 0: nothing is left to measure"
        )
    cases: list[Case] = []
    for batch in numbers(args, "batch", int, 0):
        cases += [Case(f"pp{n}", batch, n, 1, n) for n in prompts]
        cases += [Case(f"tg{n}", batch, 1, n, n) for n in outputs]
        cases += [Case(f"pp{n}+tg{m}", batch, n, m, n + m) for n in prompts for m in outputs]
    return cases


def options_of(args: argparse.Namespace, cases: Sequence[Case]) -> EngineOptions:
    """Return options with the rows and the context that the cases need.

    Raises ConfigError if the flags ask for fewer rows or a shorter context.
    """
    given = engine_options(args)
    rows = max(_rows(case, args.data * args.expert) for case in cases)
    longest = max(cases, key=lambda case: case.context)
    if given.max_batch is not None and given.max_batch < rows:
        raise ConfigError(
            f"--batch: {rows} sequences a lane do not fit --max-batch {given.max_batch} (raise it)"
        )
    context = read_spec(read_config(str(args.model))[1])[1].max_positions
    if given.max_context is not None:
        context = min(context, given.max_context)
    if longest.context > context:
        raise ConfigError(
            f"{longest.test} takes {longest.context} tokens, more than the context of {context} "
            f"(--prompt-tokens, --output-tokens, --max-context)"
        )
    return replace(
        given, max_batch=given.max_batch or rows, max_context=given.max_context or longest.context
    )


def _rows(case: Case, lanes: int) -> int:
    """Return the rows of a case in one lane."""
    return -(-case.batch // lanes)


def check_room(case: Case, config: EngineConfig) -> None:
    """Raise ConfigError if the cache cannot hold all sequences of a case at a time.

    Some would wait, and the measurement would be of a smaller batch.
    """
    rows = _rows(case, config.lanes)
    if rows > config.held_rows(case.context):
        pages = min(pool.pages for pool in config.pools)
        raise ConfigError(
            f"{case.test} with --batch {case.batch}: {rows} sequences of {case.context} tokens "
            f"do not fit a cache of {pages * config.page_size} tokens a lane (--cache-tokens, or "
            f"a smaller batch)"
        )


def open_llm(args: argparse.Namespace, options: EngineOptions, console: Console) -> LLM:
    """Load the model of the flags; JaxserveError for a model that embeds."""
    mesh = MeshSpec(data=args.data, expert=args.expert, tensor=args.tensor)
    with Bar(console, "loading") as bar:
        llm = LLM(
            args.model,
            dtype=args.dtype,
            weights=args.weights,
            options=options,
            mesh=mesh,
            on_load=bar.update,
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
    llm: LLM, cases: Sequence[Case], args: argparse.Namespace, bar: Bar
) -> Iterator[Result]:
    """Run each case once to warm up, then measure the repetitions.

    Raises EngineError if a step was compiled meanwhile.
    """
    rng = np.random.default_rng(args.seed)
    total = len(cases) * (args.repetitions + 1)
    tokens = np.setdiff1d(np.arange(llm.model.spec.vocab_size), llm.model.eos_ids)
    for place, case in enumerate(cases):
        seconds: list[float] = []
        for number in range(args.repetitions + 1):
            bar.update(
                place * (args.repetitions + 1) + number, total, f"{case.test} x {case.batch}"
            )
            prompts = rng.choice(tokens, (case.batch, case.prompt)).tolist()
            seconds.append(timed(llm.engine, prompts, [case.output] * case.batch))
        compiles = llm.runner.compiles_after_ready
        if compiles:
            raise EngineError(
                f"{case.test}: {compiles} compiles while it was measured: the figures would be "
                f"wrong"
            )
        yield Result(case, seconds[1:])
    bar.update(total, total, "")


def timed(engine: Engine, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
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
        made += sum(len(event.tokens) for event in engine.step())
    seconds = time.perf_counter() - began
    if made != sum(lengths):
        raise EngineError(f"{made} tokens were made instead of {sum(lengths)}")
    return seconds


def about(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Return facts about model and engine.

    bytes: of all parameters, each counted once however many devices hold it.
    """
    model = llm.model
    config = llm.runner.config
    return {
        "model": args.model.resolve().name,
        "parameters": model.parameters,
        "bytes": sum(
            stored_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(model.params)
        ),
        "dtype": str(scheme_in(model.params) or model.params["embed"].dtype),
        "device": device_kind(model.mesh),
        "mesh": str(MeshSpec(args.data, args.expert, args.tensor)),
        "engine": asdict(config),
    }


def text(
    output: str, results: Sequence[Result], about: dict[str, Any], found: dict[str, Any]
) -> str:
    """Return the results as md, csv or json."""
    rows = [result.to_json() for result in results]
    if output == "json":
        environment = found | {"device": about["device"]}
        whole = {
            "environment": environment,
            "benchmark": "offline",
            "model": about,
            "results": rows,
        }
        return json.dumps(whole, indent=1) + "\n"
    named = {
        name: about[name] for name in ("model", "parameters", "bytes", "dtype", "device", "mesh")
    }
    if output == "csv":
        return comma_separated([named | {"jax": found["jax"]} | row for row in rows])
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
