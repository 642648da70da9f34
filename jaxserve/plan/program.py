"""Work of `jaxserve plan`, once its arguments are known to be right."""

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from rich.console import Console

from jaxserve.errors import ConfigError, MemoryLimitError
from jaxserve.flag_errors import flag_error
from jaxserve.loading.spec import read_spec
from jaxserve.models.quant import SCHEMES
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.bundle import write_manifest
from jaxserve.plan.bundle_folder import new_folder
from jaxserve.plan.charts import charts
from jaxserve.plan.compile import CompiledStep, asking, compile_steps
from jaxserve.plan.deployment import Deployment, Target, deploy
from jaxserve.plan.estimate import Estimate
from jaxserve.plan.flags import DEFAULT_CONTEXT, OutputOptions, PlanOptions
from jaxserve.plan.html_report import page
from jaxserve.plan.model import weights_dtype, weights_of, weights_scheme
from jaxserve.plan.model_config import embeds
from jaxserve.plan.platform import keeping, prepare_platform
from jaxserve.plan.ranking import ranking_json, ranking_table
from jaxserve.plan.report import GIB, show, to_json
from jaxserve.plan.suggest import Precision, choices, confirmed, rank
from jaxserve.plan.topology import Topology
from jaxserve.progress import Bar
from jaxserve.sharding.errors import ChipError
from jaxserve.sharding.mesh import MeshSpec

DOES_NOT_FIT = 1
GIGABYTE = 1e9  # of --link
WIDTH = 120  # of tables where there is no terminal to ask
ROWS = 8  # of a ranking, without --all


def plan(
    options: PlanOptions, topology: Topology, model: str, described: tuple[str, dict[str, Any]]
) -> int:
    """Print the estimate of one deployment, or the ranking of many with --suggest.

    `model` is as it was given, and `described` is the model's name and its config.json.
    """
    console = Console(stderr=True, highlight=False)
    output = options.output
    prepare_platform(topology)
    name, config = described
    target = target_of(options, model, name, read_spec(config)[1], topology)
    weights = weights_of(model, options.question.weights)
    dtype = weights_dtype(weights, config)
    precision = Precision(dtype, weights_scheme(weights), target.options.kv)
    if output.suggest is not None:
        return suggest(options, target, candidates(options, precision), console)
    try:
        estimate = compiled_or_counted(options, target, precision, console)
    except MemoryLimitError as error:
        return refuse(error, output, console)
    if output.json:
        print(json.dumps(to_json(estimate)))
    else:
        show(estimate, standard_output())
    if output.plot:
        write("--plot", output.plot, charts(estimate))
    if output.html:
        write("--html", output.html, page(estimate))
    if output.out:
        finish_bundle(output.out, estimate, console)
    return 0 if estimate.fits else DOES_NOT_FIT


def compiled_or_counted(
    options: PlanOptions, target: Target, precision: Precision, console: Console
) -> Estimate:
    """Return the estimate; without a compiler it is counted.

    ChipError without a compiler if compiled steps are to be kept (--out).
    """
    try:
        return estimate_of(options, deployed(options, target, precision, console), console)
    except ChipError as error:
        if options.output.out or not options.output.compile:
            raise
        counted_only(error, console)
    counted = replace(options, output=replace(options.output, compile=False))
    return estimate_of(counted, deployed(counted, target, precision, console), console)


def counted_only(error: ChipError, console: Console) -> None:
    """Say that there is no compiler."""
    console.print(f"counted only: {error}", soft_wrap=True, markup=False)


def target_of(
    options: PlanOptions, model: str, name: str, spec: ModelSpec, topology: Topology
) -> Target:
    """Return what is to be served.

    With --link it is a server that exchanges pages, which takes memory and steps of its own.
    """
    question = options.question
    if question.link and embeds(model):
        raise ConfigError(
            f"--link is for servers that generate, and {name} embeds: it has no output that "
            f"another server could go on with (leave it out)"
        )
    engine = replace(options.engine, page_exchange=question.link is not None)
    return Target(name, spec, topology, engine, question.memory_fraction)


def deployed(
    options: PlanOptions, target: Target, precision: Precision, console: Console
) -> Deployment:
    """Return the deployment on the mesh of the options."""
    data = options.mesh.data or 1
    expert = options.mesh.expert or 1
    tensor = options.mesh.tensor or max(target.topology.count // (data * expert), 1)
    axes = MeshSpec(data, expert, tensor)
    with Bar(console, "sizing") as bar:
        footprint = asking(bar.update) if options.output.compile else None
        return deploy(target, axes, precision.dtype, footprint, precision.scheme)


def estimate_of(options: PlanOptions, deployment: Deployment, console: Console) -> Estimate:
    """Compile the steps unless --no-compile is given, and return the estimate."""
    question = options.question
    output = options.output
    context = context_of(question.context, deployment.config.max_context)
    steps: dict[str, CompiledStep] = {}
    if output.compile:
        buckets = deployment.largest() if output.buckets == "largest" else deployment.buckets
        kept = keeping(new_folder(output.out)) if output.out else nullcontext()
        with kept, Bar(console, "compiling") as bar:
            steps = compile_steps(deployment, buckets, bar.update)
    limits = deployment.topology.limits
    link = question.link and question.link * GIGABYTE
    return Estimate(deployment, context, limits, question.price, steps, link)


def context_of(asked: int | None, limit: int) -> int:
    """Return the context for which times are given; `limit` is the engine's."""
    if asked and asked > limit:
        raise flag_error(
            "--context",
            asked,
            f"it must be at most the engine's context of {limit} (--max-context, or the model's)",
        )
    return asked or min(DEFAULT_CONTEXT, limit)


def suggest(
    options: PlanOptions, target: Target, precisions: Sequence[Precision], console: Console
) -> int:
    """Rank all choices by counting, then compile the best ones and rank again.

    Without a compiler the first ranking is printed.
    """
    limits = target.topology.limits
    assert limits, "check_topology refuses a topology without"
    output = options.output
    question = options.question
    limit = target.options.max_context or target.spec.max_positions
    context = context_of(question.context, limit)
    with quiet_engine():
        found = choices(target, precisions, context, question.price)
        best = rank(found, limits, target.options.prefer)[: output.suggest]
        for ranked in best if output.compile else ():
            try:
                with Bar(console, "compiling") as bar:
                    found[found.index(ranked.choice)] = confirmed(ranked, bar.update)
            except ChipError as error:
                counted_only(error, console)
                break
        ranking = rank(found, limits, target.options.prefer)
    not_fitting = [choice for choice in found if not choice.fits]
    rest = sorted(not_fitting, key=lambda choice: choice.missing)
    if output.json:
        print(json.dumps(ranking_json(ranking, rest)))
    else:
        rows = None if output.all else ROWS
        standard_output().print(ranking_table(ranking, rest, rows))
    return 0 if ranking else DOES_NOT_FIT


@contextmanager
def quiet_engine() -> Iterator[None]:
    """Silence the engine's warnings about kernels that it passes over.

    Every deployment would repeat them; the table has the kernel of each.
    """
    engine = logging.getLogger("jaxserve.engine")
    level = engine.level
    engine.setLevel(logging.ERROR)
    try:
        yield
    finally:
        engine.setLevel(level)


def candidates(options: PlanOptions, asked: Precision) -> list[Precision]:
    """Return the precisions to rank: what was asked for, and common choices where it was left open.

    Without --allow-quantized weights stay as the loader makes them of what is stored, and pages
    have their dtype. With it, weights are also tried in bfloat16, int8 and int4, and pages in int8.
    """
    weights = [(asked.dtype, asked.scheme)]
    rounds = options.output.allow_quantized
    if rounds and options.question.weights == "auto" and asked.scheme is None:
        halves = jnp.dtype(jnp.bfloat16)
        weights += [(halves, None)] if asked.dtype != halves else []
        weights += [(asked.dtype, SCHEMES[name]) for name in ("int8", "int4-g128")]
    found = []
    for dtype, scheme in weights:
        pages = [asked.kv]
        if asked.kv == "auto":
            pages = [str(dtype), *(["int8"] if rounds else [])]
        found += [Precision(dtype, scheme, kv) for kv in pages]
    return found


def standard_output() -> Console:
    """Return the console of standard output, with a fixed width where it is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def write(flag: str, path: Path, content: str) -> None:
    """Write the file of a flag; ConfigError if that cannot be done."""
    try:
        path.write_text(content)
    except OSError as error:
        raise flag_error(flag, path, f"it cannot be written: {error.strerror}") from None


def finish_bundle(folder: Path, estimate: Estimate, console: Console) -> None:
    if estimate.fits:
        write_manifest(estimate.deployment, folder)
    else:
        problem = f"{folder} has no manifest, and is no bundle: the model does not fit"
        console.print(problem, soft_wrap=True, markup=False)


def refuse(error: MemoryLimitError, output: OutputOptions, console: Console) -> int:
    """Print why there is no estimate: no room for a single page, or the compiler refused a step."""
    for path in (output.plot, output.html):
        if path:
            console.print(f"{path} is not written: there is no estimate", soft_wrap=True)
    if output.json:
        print(json.dumps({"fits": False, "missing": error.missing or None, "reason": str(error)}))
    else:
        lack = f"; every device lacks {error.missing / GIB:.2f} GiB" if error.missing else ""
        print(f"It does not fit: {error}{lack}.")
    return DOES_NOT_FIT
