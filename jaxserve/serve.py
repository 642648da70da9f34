"""python -m jaxserve.serve: a checkpoint behind gRPC and HTTP, until it is told to stop."""

import argparse
import asyncio
import gc
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import uvloop
from rich.console import Console

from checkpoints.errors import CheckpointError
from jaxserve.cli.compilation_cache import read_compiled, use_compilation_cache
from jaxserve.cli.exits import exit_code
from jaxserve.cli.flags import draft_model, engine_options
from jaxserve.cli.output import Bar
from jaxserve.cluster.bootstrap import Hosts, Pod, SingleHost, join, leave
from jaxserve.cluster.compatibility import facts_of_engine, facts_of_start
from jaxserve.cluster.heartbeat import PodFailure
from jaxserve.engine.device.weight_report import describe, sizes_of
from jaxserve.errors import JaxserveError, RestartingError
from jaxserve.llm import LLM
from jaxserve.plan.bundle import CACHE, Manifest, check_engine, open_bundle
from jaxserve.server.assembly import assemble, engine_card, handshake_of, model_card, step_use
from jaxserve.server.disaggregation.flags import Meshes, disaggregation, meshes
from jaxserve.server.disaggregation.local_mesh import DecodeMeshRole, Place, PrefillMesh, places
from jaxserve.server.disaggregation.roles import Role, role_of
from jaxserve.server.flags import check_bundle, limits, parser, tokens
from jaxserve.server.follower import healthy, on_signals
from jaxserve.server.lifecycle import FAILED, Lifecycle
from jaxserve.server.listeners import Listeners
from jaxserve.server.observe.log import RequestLog, configure
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.observe.traces import Traces, open_provider
from jaxserve.server.readiness import Gate, Phase
from jaxserve.server.serving_state import Behind, EngineCard, ModelCard, Served
from jaxserve.tokenizer import TokenizerError
from pallas_kernels.dispatch import KernelError
from sharding.mesh import MeshSpec, device_kind
from sharding.rules import ShardingError

if TYPE_CHECKING:
    from jaxserve.cluster.follower import Follower
    from jaxserve.cluster.leader import Leader

log = logging.getLogger("jaxserve.serve")
LAST_WORDS = 5.0  # seconds to tell every client that a host is gone
EXPECTED = (JaxserveError, CheckpointError, TokenizerError, ShardingError, KernelError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 after a drain, 2 when something asked for cannot be done, 70 when the engine
    failed.
    """
    args = parser().parse_args(arguments)
    configure(args.log_format, args.log_level)
    return leave(exit_code(lambda: run(args), EXPECTED))


def run(args: argparse.Namespace) -> int:
    console = Console(stderr=True, highlight=False)
    apart = meshes(args)
    with ExitStack() as resources:
        pod = resources.enter_context(join(Hosts.of(args)))
        manifest = use_bundle(args) if args.bundle else None
        if manifest is None:
            use_compilation_cache(args.compilation_cache)
        if pod.leads is False:
            return follow(args, console, pod, manifest)
        serving = serve(args, console, pod, manifest, apart, resources)
        code = asyncio.run(serving, loop_factory=uvloop.new_event_loop)
        if code == FAILED:
            pod.fail()
            os._exit(code)  # the engine's thread may hang for ever, and whatever waits for it
        return code


def follow(
    args: argparse.Namespace, console: Console, pod: "Follower", manifest: Manifest | None
) -> int:
    """What another host of the pod does: it computes, and only its leader is asked."""
    with healthy(args.host, args.port), open_llm(args, console, pod, manifest) as llm:
        on_signals(pod.leave)
        return pod.follow(llm.runner)


async def serve(
    args: argparse.Namespace,
    console: Console,
    pod: "SingleHost | Leader",
    manifest: Manifest | None,
    apart: Meshes | None,
    resources: ExitStack,
) -> int:
    """apart: where prompts have a mesh of their own. resources: closes the models in the end."""
    gate, loop = Gate(), asyncio.get_running_loop()
    metrics = Metrics(
        lambda: gate.served.compiles_after_ready() if gate.served else 0,
        lambda: gate.phase is Phase.READY,
    )
    role = role_of(disaggregation(args), gate, metrics.registry)
    provider = open_provider() if args.otel else None
    if provider:
        resources.callback(provider.shutdown)  # sends what is left
    listeners = Listeners(
        gate, limits(args), tokens(args), metrics.text, metrics.families, role.faces
    )
    lifecycle = Lifecycle(
        gate,
        listeners.stop,
        args.drain_timeout,
        args.step_timeout,
        leaving=lambda: role.exports_in_flight,
    )
    await listeners.start(args, lifecycle.drain, lifecycle.fail)
    lifecycle.watch_signals()

    def load_prefill(place: Place) -> Behind:
        llm = resources.enter_context(open_llm(args, console, pod, manifest, place))
        engine = engine_card(llm)
        console.print(f"prefill  {mesh_of(engine)}, {cache_of(engine)}", soft_wrap=True)
        compile_all(llm, console, manifest)
        return Behind(*assemble(llm, limits(args), (), loop, lifecycle.fail, Role()), llm.runner)

    def load() -> Served:
        first, second = places(apart, jax.devices()) if apart else (None, None)
        prefill = (
            load_prefill(first) if first else None
        )  # ready before the other engine begins to count compiles
        llm = resources.enter_context(open_llm(args, console, pod, manifest, second))
        handshake = handshake_of(llm) if args.role != "both" else None
        model, engine = (
            model_card(llm, args.served_model_name or args.model.resolve().name),
            engine_card(llm),
        )
        introduce(model, engine, console)
        if role.introduction:
            console.print(f"role     {role.introduction}", soft_wrap=True, markup=False)
        if llm.draft:
            console.print(
                f"drafts   {args.draft_model}: {describe(sizes_of(llm.draft.params))}",
                soft_wrap=True,
            )
        compile_all(llm, console, manifest)
        observers = (metrics, RequestLog(), *([Traces(provider, model.name)] if provider else []))
        decodes = role
        if apart and prefill:
            mesh = PrefillMesh(prefill, llm.runner)
            console.print(f"pages    {mesh.transfer_path}", soft_wrap=True)
            decodes = DecodeMeshRole(apart, mesh, metrics.registry)
        service, thread = assemble(llm, limits(args), observers, loop, lifecycle.fail, decodes)
        loop.call_soon_threadsafe(role.open, handshake)
        if mixture := llm.model.spec.mixture:
            loop.call_soon_threadsafe(
                metrics.watch_experts, mixture.layers, thread, llm.runner.expert_load
            )
        gc.collect()
        # modules and compiled steps stay: every full collection would hold all up to walk them
        # again
        gc.freeze()
        compiles, steps = (lambda: llm.runner.compiles_after_ready), (lambda: step_use(llm))
        return Served(service, thread, model, engine, compiles, steps, handshake, prefill)

    def changed(phase: Phase) -> None:
        listeners.tell(phase)
        if phase is Phase.READY:
            pod.watch(lost, evicted, LAST_WORDS)
            console.print(f"ready: {listeners.addresses}", soft_wrap=True)

    def lost(failure: PodFailure) -> None:
        loop.call_soon_threadsafe(lifecycle.fail, RestartingError(failure.reason))

    def evicted(reason: str) -> None:
        log.info("draining: %s", reason)
        loop.call_soon_threadsafe(lifecycle.drain)

    gate.changed = changed
    try:
        return await lifecycle.run(load)
    except BaseException:
        await listeners.stop(0)
        raise
    finally:
        await role.close()


def use_bundle(args: argparse.Namespace) -> Manifest:
    """ConfigError when it is not whole, of another version, or for something else than what is
    asked.
    """
    manifest = open_bundle(args.bundle)
    check_bundle(args, manifest)
    read_compiled(args.bundle / CACHE)
    return manifest


def open_llm(
    args: argparse.Namespace,
    console: Console,
    pod: Pod,
    manifest: Manifest | None,
    place: Place | None = None,
) -> LLM:
    """place: where it has a part of the devices."""
    options = replace(engine_options(args), page_exchange=args.role != "both" or place is not None)
    dtype, weights = args.dtype, args.weights
    mesh = place.mesh if place else MeshSpec(data=args.data, expert=args.expert, tensor=args.tensor)
    if prefills := place is not None and place.prefills:
        options = replace(options, speculate="off", draft_tokens=None)
    if manifest:
        options, dtype, weights, mesh = (
            manifest.options(),
            manifest.dtype,
            manifest.weights,
            manifest.axes,
        )
    pod.agree("start", partial(facts_of_start, mesh, dtype, weights, options))
    with Bar(console, "loading") as loading, place.named() if place else nullcontext():
        llm = LLM(
            args.model,
            dtype=dtype,
            weights=weights,
            options=options,
            mesh=mesh,
            devices=place.devices if place else None,
            chat_template=args.chat_template,
            tool_parser=args.tool_parser,
            reasoning_parser=args.reasoning_parser,
            draft_model=None if prefills else draft_model(args),
            grammar_bounds=limits(args).grammars,
            on_load=loading.update,
            new_runner=pod.new_runner,
        )
    model = llm.model
    if manifest:
        kind, dtype = device_kind(model.mesh), str(model.params["embed"].dtype)
        check_engine(manifest, model.spec, dtype, kind, llm.runner.config, model.weights)
    pod.agree(
        "engine",
        partial(facts_of_engine, model.spec, model.params, model.weights, llm.runner.config),
    )
    return llm


def compile_all(llm: LLM, console: Console, manifest: Manifest | None) -> None:
    """Every step that the engine can ever launch; those that a bundle should have had and has not
    are named.
    """
    buckets = llm.runner.buckets.buckets
    with Bar(console, "compiling") as bar:
        llm.runner.warm_up(buckets, bar.update)
    llm.measure_steps()
    llm.prompts.grammars.warm_up()
    if manifest is None:
        console.print(
            f"{len(buckets)} steps compiled, {llm.runner.found_compiled} compiles found in the "
            f"cache"
        )
        return
    missed, total = llm.runner.missed, llm.runner.programs
    console.print(
        f"{total - len(missed)} of {total} steps and writers of rows found in the bundle",
        soft_wrap=True,
    )
    for name in missed:
        console.print(
            f"not found in the bundle, so compiled here: {name}", soft_wrap=True, markup=False
        )


def introduce(model: ModelCard, engine: EngineCard, console: Console) -> None:
    purpose = (
        f", embeddings of {model.embedding_dimensions} numbers"
        if model.embedding_dimensions
        else ""
    )
    lines = (
        f"model    {model.name} ({model.architecture}), {model.parameters / 1e6:,.1f} M "
        f"parameters, {model.weights}" + purpose,
        f"weights  {describe(model.sizes)}",
        f"mesh     {mesh_of(engine)}",
        f"engine   {engine.max_batch} rows, {engine.step_tokens} tokens a step, context "
        f"{model.max_context}",
        f"cache    {cache_of(engine)}",
    )
    for line in lines:
        console.print(line, soft_wrap=True)


def mesh_of(engine: EngineCard) -> str:
    axes = " x ".join(f"{axis} {size}" for axis, size in engine.mesh.items())
    copies = f", every kv head on {engine.kv_copies} devices" if engine.kv_copies > 1 else ""
    return f"{axes} on {engine.device_kind}{copies}"


def cache_of(engine: EngineCard) -> str:
    return f"{engine.cache_tokens:,} tokens in pages of {engine.page_size}, {engine.kv}"


if __name__ == "__main__":
    sys.exit(main())
