"""python -m jaxserve.serve: a checkpoint behind gRPC and HTTP, until it is told to stop."""

import argparse
import asyncio
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import uvloop
from rich.console import Console

from checkpoints.errors import CheckpointError
from jaxserve.cli.compilation_cache import read_compiled, use_compilation_cache
from jaxserve.cli.exits import exit_code
from jaxserve.cli.flags import engine_options
from jaxserve.cli.output import Bar
from jaxserve.errors import JaxserveError
from jaxserve.llm import LLM
from jaxserve.plan.bundle import CACHE, Manifest, check_engine, open_bundle
from jaxserve.server import log
from jaxserve.server.assembly import assemble, engine_card, model_card
from jaxserve.server.flags import check_bundle, limits, parser, tokens
from jaxserve.server.gate import Gate, Phase
from jaxserve.server.lifecycle import FAILED, Lifecycle
from jaxserve.server.listeners import Listeners
from jaxserve.server.log import RequestLog
from jaxserve.server.metrics import Metrics
from jaxserve.server.model import EngineCard, ModelCard, Served
from jaxserve.tokenizer import TokenizerError
from pallas_kernels.dispatch import KernelError
from sharding.mesh import MeshSpec, device_kind
from sharding.rules import ShardingError

EXPECTED = (JaxserveError, CheckpointError, TokenizerError, ShardingError, KernelError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 after a drain, 2 when something asked for cannot be done, 70 when the engine failed."""
    args = parser().parse_args(arguments)
    log.configure(args.log_format, args.log_level)
    return exit_code(lambda: run(args), EXPECTED)


def run(args: argparse.Namespace) -> int:
    with ExitStack() as resources:
        work = serve(args, Console(stderr=True, highlight=False), resources)
        code = asyncio.run(work, loop_factory=uvloop.new_event_loop)
        if code == FAILED:
            os._exit(code)  # the engine's thread may hang for ever, and whatever waits for it
        return code


async def serve(args: argparse.Namespace, console: Console, resources: ExitStack) -> int:
    """resources: closes the model in the end."""
    manifest = use_bundle(args) if args.bundle else None
    if manifest is None:
        use_compilation_cache(args.compilation_cache)
    gate, loop = Gate(), asyncio.get_running_loop()
    metrics = Metrics(lambda: gate.served.compiles_after_ready() if gate.served else 0)
    listeners = Listeners(gate, limits(args), tokens(args), metrics.render)
    lifecycle = Lifecycle(gate, listeners.stop, args.drain_timeout, args.step_timeout)
    await listeners.start(args, lifecycle.drain, lifecycle.fail)
    lifecycle.watch_signals()

    def load() -> Served:
        llm = resources.enter_context(open_llm(args, console, manifest))
        model, engine = model_card(llm, args.served_model_name or args.model.resolve().name), engine_card(llm)
        introduce(model, engine, console)
        compile_all(llm, console, manifest)
        service, thread = assemble(llm, limits(args), (metrics, RequestLog()), loop, lifecycle.fail)
        gc.collect()
        gc.freeze()  # modules and compiled steps stay: every full collection would hold all up to walk them again
        return Served(service, thread, model, engine, lambda: llm.runner.compiles_after_ready)

    def changed(phase: Phase) -> None:
        listeners.tell(phase)
        if phase is Phase.READY:
            console.print(f"ready: {listeners.addresses}", soft_wrap=True)

    gate.changed = changed
    try:
        return await lifecycle.run(load)
    except BaseException:
        await listeners.stop(0)
        raise


def use_bundle(args: argparse.Namespace) -> Manifest:
    """ConfigError when it is not whole, of another version, or for something else than what is asked."""
    manifest = open_bundle(args.bundle)
    check_bundle(args, manifest)
    read_compiled(args.bundle / CACHE)
    return manifest


def open_llm(args: argparse.Namespace, console: Console, manifest: Manifest | None) -> LLM:
    with Bar(console, "loading") as loading:
        llm = LLM(
            args.model,
            dtype=manifest.dtype if manifest else args.dtype,
            options=manifest.options() if manifest else engine_options(args),
            mesh=manifest.axes if manifest else MeshSpec(data=args.data, tensor=args.tensor),
            chat_template=args.chat_template,
            on_load=loading.update,
        )
    if manifest:
        model, kind = llm.model, device_kind(llm.model.mesh)
        check_engine(manifest, model.spec, str(model.params["embed"].dtype), kind, llm.runner.config)
    return llm


def compile_all(llm: LLM, console: Console, manifest: Manifest | None) -> None:
    """Every step that the engine can ever launch; those that a bundle should have had and has not are named."""
    buckets = llm.runner.buckets.buckets
    with Bar(console, "compiling") as bar:
        llm.runner.warm_up(buckets, bar.update)
    if manifest is None:
        console.print(f"{len(buckets)} steps compiled, {llm.runner.found_compiled} compiles found in the cache")
        return
    missed = llm.runner.missed
    total = len(buckets) + len(llm.runner.writers)
    console.print(f"{total - len(missed)} of {total} steps and writers of rows found in the bundle", soft_wrap=True)
    for name in missed:
        console.print(f"not found in the bundle, so compiled here: {name}", soft_wrap=True, markup=False)


def introduce(model: ModelCard, engine: EngineCard, console: Console) -> None:
    mesh = " x ".join(f"{axis} {size}" for axis, size in engine.mesh.items())
    copies = f", every kv head on {engine.kv_copies} devices" if engine.kv_copies > 1 else ""
    lines = (
        f"model    {model.name} ({model.architecture}), {model.parameters / 1e6:,.1f} M parameters, {model.dtype}",
        f"mesh     {mesh} on {engine.device_kind}{copies}",
        f"engine   {engine.max_batch} rows, {engine.step_tokens} tokens a step, context {model.max_context}",
        f"cache    {engine.cache_tokens:,} tokens in pages of {engine.page_size}",
    )
    for line in lines:
        console.print(line, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
