"""python -m jaxserve.plan: does it fit, and how fast can it be, on devices that are not here."""

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console

from checkpoints.errors import CheckpointError
from jaxserve.cli.exits import exit_code
from jaxserve.cli.flags import engine_options
from jaxserve.cli.output import prepare_output
from jaxserve.errors import JaxserveError, MemoryLimitError
from jaxserve.load import read_spec
from jaxserve.plan.account import Account
from jaxserve.plan.deployment import Deployment, deploy
from jaxserve.plan.flags import DEFAULT_CONTEXT, parser
from jaxserve.plan.model import pages_dtype, read_config, weights_dtype
from jaxserve.plan.platform import prepare_platform
from jaxserve.plan.report import GIB, show, to_json
from jaxserve.plan.topology import Topology, parse
from pallas_kernels.dispatch import KernelError
from sharding.absent import AbsentError
from sharding.mesh import MeshSpec
from sharding.rules import ShardingError

EXPECTED = (JaxserveError, CheckpointError, ShardingError, KernelError, AbsentError)
DOES_NOT_FIT = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when it fits, 1 when it does not, 2 when something asked for cannot be done."""
    args = parser().parse_args(arguments)
    prepare_output(args.json)
    return exit_code(lambda: plan(args), EXPECTED)


def plan(args: argparse.Namespace) -> int:
    topology = parse(args.topology)
    prepare_platform(topology)
    try:
        account = account_of(args, ask(args, topology))
    except MemoryLimitError as error:
        return refuse(error, args)
    if args.json:
        print(json.dumps(to_json(account)))
    else:
        show(account, Console(highlight=False))
    return 0 if account.fits else DOES_NOT_FIT


def ask(args: argparse.Namespace, topology: Topology) -> Deployment:
    name, config = read_config(args.model)
    spec = read_spec(config)[1]
    dtype = weights_dtype(args.weights, config)
    pages_dtype(args.kv, dtype)
    tensor = args.tensor or max(topology.count // (args.data * args.expert), 1)
    axes = MeshSpec(data=args.data, expert=args.expert, tensor=tensor)
    return deploy(
        name,
        spec,
        dtype,
        topology,
        axes,
        engine_options(args),
        compilers=not args.no_compile,
        memory_fraction=args.memory_fraction,
    )


def account_of(args: argparse.Namespace, deployment: Deployment) -> Account:
    most = deployment.config.max_context
    context = min(args.context or DEFAULT_CONTEXT, most)
    return Account(deployment, context, deployment.estimated_budget(), True, deployment.topology.limits, args.price)


def refuse(error: MemoryLimitError, args: argparse.Namespace) -> int:
    """For what leaves no room for a single page."""
    verdict = f"It does not fit: {error}; every device lacks {error.missing / GIB:.2f} GiB."
    print(json.dumps({"fits": False, "missing": error.missing, "reason": str(error)}) if args.json else verdict)
    return DOES_NOT_FIT


if __name__ == "__main__":
    sys.exit(main())
