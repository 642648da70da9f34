"""python -m jaxserve.plan: does it fit, and how fast can it be, on devices that are not here."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
from rich.console import Console

from checkpoints.errors import CheckpointError
from jaxserve.cli.exits import exit_code
from jaxserve.cli.flags import engine_options
from jaxserve.cli.output import Bar, prepare_output
from jaxserve.errors import ConfigError, JaxserveError, MemoryLimitError
from jaxserve.loading.parameters import DTYPES
from jaxserve.loading.spec import read_spec
from jaxserve.models.quant import SCHEMES
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.bundle import check_free, new_folder, write_manifest
from jaxserve.plan.charts import charts
from jaxserve.plan.compile import CompiledStep, asking, compile_steps
from jaxserve.plan.deployment import Deployment, Target, deploy
from jaxserve.plan.estimate import Account
from jaxserve.plan.flags import DEFAULT_CONTEXT, check, parser
from jaxserve.plan.model import embeds, read_config, weights_dtype, weights_form, weights_of
from jaxserve.plan.platform import keeping, prepare_platform
from jaxserve.plan.ranking import ranking_json, ranking_table
from jaxserve.plan.report import GIB, show, to_json
from jaxserve.plan.suggest import Precision, choices, confirmed, rank
from jaxserve.plan.topology import Topology, parse
from pallas_kernels.dispatch import KernelError
from sharding.chips import ChipError
from sharding.mesh import MeshSpec
from sharding.rules import ShardingError

EXPECTED = (JaxserveError, CheckpointError, ShardingError, KernelError, ChipError)
DOES_NOT_FIT = 1
GIGABYTE = 1e9  # of --link
WIDTH = 120  # of tables where there is no terminal to ask


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when it fits, 1 when it does not, 2 when something asked for cannot be done."""
    args = parser().parse_args(arguments)
    prepare_output(args.json)
    return exit_code(lambda: plan(args), EXPECTED)


def plan(args: argparse.Namespace) -> int:
    check(args)
    console, topology = Console(stderr=True, highlight=False), parse(args.topology)
    check_topology(args, topology)
    prepare_platform(topology)
    name, config = read_config(args.model)
    target = target_of(args, name, read_spec(config)[1], topology)
    weights = weights_of(args.model, args.weights)
    precision = Precision(weights_dtype(weights, config), weights_form(weights), target.options.kv)
    if args.suggest is not None:
        return suggest(args, target, candidates(args, precision), console)
    try:
        account = account_of(args, deployed(args, target, precision, console), console)
    except MemoryLimitError as error:
        return refuse(error, args)
    if args.json:
        print(json.dumps(to_json(account)))
    else:
        show(account, output())
    if args.plot:
        write_plot(args.plot, charts(account))
    if args.out:
        finish_bundle(args, account, console)
    return 0 if account.fits else DOES_NOT_FIT


def check_topology(args: argparse.Namespace, topology: Topology) -> None:
    """ConfigError for what could not be done in the end, before anything is compiled."""
    if args.out and not topology.serializes:
        raise ConfigError(
            f"--out: what is compiled for an absent {args.topology} is not tuned for it (leave "
            f"it out)"
        )
    if args.out:
        check_free(args.out)
    if args.plot and (args.plot.is_dir() or not os.access(args.plot.parent, os.W_OK)):
        raise ConfigError(f"--plot {args.plot}: no file can be written there (name another)")
    for flag in ("plot", "suggest", "link"):
        if getattr(args, flag) is not None and topology.limits is None:
            raise ConfigError(
                f"--{flag}: nobody publishes how fast {topology.name} is (leave it out)"
            )


def target_of(args: argparse.Namespace, name: str, spec: ModelSpec, topology: Topology) -> Target:
    """With --link, a server that exchanges pages: what that takes is in its memory and its
    steps."""
    if args.link and embeds(args.model):
        raise ConfigError(
            f"--link: {name} embeds: it has no output that another server could go on with "
            f"(leave it out)"
        )
    options = replace(engine_options(args), page_exchange=args.link is not None)
    return Target(name, spec, topology, options, args.memory_fraction)


def deployed(
    args: argparse.Namespace, target: Target, precision: Precision, console: Console
) -> Deployment:
    data, expert = args.data or 1, args.expert or 1
    axes = MeshSpec(data, expert, args.tensor or max(target.topology.count // (data * expert), 1))
    with Bar(console, "sizing") as bar:
        footprint = None if args.no_compile else asking(bar.update)
        return deploy(target, axes, precision.dtype, footprint, precision.form)


def account_of(args: argparse.Namespace, deployment: Deployment, console: Console) -> Account:
    context, steps = context_of(args, deployment.config.max_context), dict[str, CompiledStep]()
    if not args.no_compile:
        buckets = deployment.largest() if args.buckets == "largest" else deployment.buckets
        kept = keeping(new_folder(args.out)) if args.out else nullcontext()
        with kept, Bar(console, "compiling") as bar:
            steps = compile_steps(deployment, buckets, bar.update)
    return Account(
        deployment,
        context,
        deployment.topology.limits,
        args.price,
        steps,
        args.link and args.link * GIGABYTE,
    )


def context_of(args: argparse.Namespace, most: int) -> int:
    if args.context and args.context > most:
        raise ConfigError(
            f"--context {args.context}: the engine's is {most} (--max-context, or the model's)"
        )
    return args.context or min(DEFAULT_CONTEXT, most)


def suggest(
    args: argparse.Namespace, target: Target, precisions: Sequence[Precision], console: Console
) -> int:
    """Rank what can be counted, then compile the best of it; without compilers the first ranking
    stays.
    """
    limits = target.topology.limits
    assert limits  # check_topology
    context = context_of(args, target.options.max_context or target.spec.max_positions)
    with quiet_engine():
        found = choices(target, precisions, context, args.price)
        best = [] if args.no_compile else rank(found, limits, target.options.prefer)[: args.suggest]
        for ranked in best:
            try:
                with Bar(console, "compiling") as bar:
                    found[found.index(ranked.choice)] = confirmed(ranked, bar.update)
            except ChipError as error:
                console.print(f"counted only: {error}", soft_wrap=True, markup=False)
                break
    ranking = rank(found, limits, target.options.prefer)
    rest = sorted(
        (choice for choice in found if not choice.fits), key=lambda choice: choice.missing
    )
    if args.json:
        print(json.dumps(ranking_json(ranking, rest)))
    else:
        output().print(ranking_table(ranking, rest))
    return 0 if ranking else DOES_NOT_FIT


@contextmanager
def quiet_engine() -> Iterator[None]:
    """Of many deployments, none says which attention it passes over: the table says which it is."""
    engine = logging.getLogger("jaxserve.engine")
    level = engine.level
    engine.setLevel(logging.ERROR)
    try:
        yield
    finally:
        engine.setLevel(level)


def candidates(args: argparse.Namespace, asked: Precision) -> list[Precision]:
    """To try: what was asked for; of what was left open all dtypes that are served, and 8 and 4
    bits.
    """
    weights = [(asked.dtype, asked.form)]
    if args.weights == "auto" and asked.form is None:
        weights = [(jnp.dtype(served), None) for served in DTYPES.values()]
        weights += [(asked.dtype, SCHEMES[name]) for name in ("int8", "int4-g128")]
    return [
        Precision(dtype, form, kv)
        for dtype, form in weights
        for kv in ((str(dtype), "int8") if asked.kv == "auto" else (asked.kv,))
    ]


def output() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def write_plot(path: Path, svg: str) -> None:
    try:
        path.write_text(svg)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror}") from None


def finish_bundle(args: argparse.Namespace, account: Account, console: Console) -> None:
    if account.fits:
        write_manifest(account.deployment, args.out)
    else:
        console.print(
            f"{args.out} has no manifest, and is no bundle: it does not fit",
            soft_wrap=True,
            markup=False,
        )


def refuse(error: MemoryLimitError, args: argparse.Namespace) -> int:
    """For what leaves no room for a single page, or what the compiler refuses."""
    lack = f"; every device lacks {error.missing / GIB:.2f} GiB" if error.missing else ""
    told = {"fits": False, "missing": error.missing or None, "reason": str(error)}
    print(json.dumps(told) if args.json else f"It does not fit: {error}{lack}.")
    return DOES_NOT_FIT


if __name__ == "__main__":
    sys.exit(main())
