"""Work of `jaxserve serve`, once its arguments are known to be right."""

import asyncio
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import uvloop
from rich.console import Console

from jaxserve.cluster.bootstrap import SingleHost, join
from jaxserve.cluster.hosts import Hosts
from jaxserve.cluster.hub_model import model_of_pod
from jaxserve.compilation_cache import finish_writing, use_compilation_cache
from jaxserve.interrupts import interrupts_kept
from jaxserve.server.disaggregation.flags import Meshes, disaggregation
from jaxserve.server.disaggregation.roles import role_of
from jaxserve.server.flags import ServeOptions, check_places, meshes_of, tokens
from jaxserve.server.follower import LeavesOnSignals, serving_health
from jaxserve.server.lifecycle import FAILED
from jaxserve.server.model_loader import ModelLoader, use_bundle
from jaxserve.server.observe.traces import open_provider
from jaxserve.server.open_files import allow_files, files_of
from jaxserve.server.process import ServerProcess

if TYPE_CHECKING:
    from jaxserve.cluster.follower import Follower
    from jaxserve.cluster.leader import Leader

LOSS_GRACE = 5.0  # seconds to tell every client that a host is gone
WRITE_SECONDS = 2.0  # that a compiled step gets to be written whole


def run(options: ServeOptions, hosts: Hosts) -> int:
    """Join the pod, then serve or follow; return the exit code."""
    console = Console(stderr=True, highlight=False)
    separate_meshes = meshes_of(options)
    with ExitStack() as resources:
        pod = resources.enter_context(join(hosts))
        if pod.leads and not hosts.alone:  # else it has happened already, or is not needed
            check_places(options)
        options = replace(options, model=model_of_pod(pod, options.model))
        manifest = use_bundle(options.bundle, options) if options.bundle else None
        if manifest is None:
            use_compilation_cache(options.engine.compilation_cache)
        loader = ModelLoader(options, console, pod, manifest, resources)
        if pod.leads is False:
            code = follow(options, pod, loader)
        else:
            serving = serve(options, pod, loader, separate_meshes, resources)
            with interrupts_kept():
                code = asyncio.run(serving, loop_factory=uvloop.new_event_loop)
            if code == FAILED:
                pod.fail()
                # Not sys.exit: it waits for threads, and the engine's may hang for ever.
                os._exit(code)
    if loader.compiling:
        # Python would wait for the compile, which may take a minute, as long as a drain may take.
        finish_writing(WRITE_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def follow(options: ServeOptions, pod: "Follower", loader: ModelLoader) -> int:
    """Compute what the leader of the pod says, which alone takes requests; return the exit code."""
    addresses = options.addresses
    with serving_health(addresses.host, addresses.port):
        llm = loader.open()
        signals = LeavesOnSignals(pod.leave)
        return signals.exit_code(pod.follow(llm.runner))


async def serve(
    options: ServeOptions,
    pod: "SingleHost | Leader",
    loader: ModelLoader,
    separate_meshes: Meshes | None,
    resources: ExitStack,
) -> int:
    """Serve until told to stop; return the exit code. The caller closes `resources`."""
    operation = options.operation
    allow_files(files_of(options.limits, options.addresses))
    provider = open_provider() if operation.otel else None
    if provider:
        resources.callback(provider.shutdown)  # sends the spans that are left

    def on_ready() -> None:
        pod.watch(process.on_host_lost, process.on_eviction, LOSS_GRACE)
        loader.say(f"ready: {process.listeners.addresses}")

    plan = disaggregation(options.roles, options.credentials)
    process = ServerProcess(
        options.limits,
        tokens(options.credentials),
        partial(role_of, plan),
        operation.drain_timeout,
        operation.step_timeout,
        on_ready,
        logs_requests=operation.log_requests,
        rules=options.rules,
    )
    load = partial(
        process.load, loader, exchanges_pages=bool(plan), meshes=separate_meshes, provider=provider
    )
    return await process.run(options, load)
