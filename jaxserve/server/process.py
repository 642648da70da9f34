"""The composition root of a server: makes all of its parts and connects them."""

import asyncio
import gc
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from jaxserve.backends import devices
from jaxserve.cluster.heartbeat import PodFailure
from jaxserve.engine.device.weight_report import describe_weights, weight_sizes
from jaxserve.engine.engine_thread import EngineThread
from jaxserve.errors import RestartingError
from jaxserve.llm import LLM
from jaxserve.server import cards
from jaxserve.server.compute_priority import lower_compute_priority
from jaxserve.server.core.client_rules import ANY_CLIENT, ClientRules
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.request_observer import RequestObserver
from jaxserve.server.disaggregation.flags import Meshes
from jaxserve.server.disaggregation.local_mesh import DecodeMeshRole, Place, PrefillMesh, places
from jaxserve.server.disaggregation.roles import Role
from jaxserve.server.engine_connector import EngineConnector
from jaxserve.server.flags import ServeOptions
from jaxserve.server.lifecycle import Lifecycle
from jaxserve.server.listeners import Listeners
from jaxserve.server.model_loader import ModelLoader
from jaxserve.server.observe.log import RequestLog
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.observe.traces import Traces
from jaxserve.server.observe.traffic_log import TrafficLog
from jaxserve.server.readiness import Phase, Readiness
from jaxserve.server.security.auth import BearerTokens
from jaxserve.server.serving_state import PrefillEngine, ServingState
from jaxserve.sharding.mesh import platform

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

NewRole = Callable[[Readiness, CollectorRegistry], Role]  # the registry is that of the metrics
NewMetrics = Callable[..., Metrics]  # takes the functions that Metrics takes
log = logging.getLogger("jaxserve.serve")


class ServerProcess:
    """The parts of one server. Lives on the event loop that it is made on.

    The listeners are made before any model is loaded, so that health checks are answered meanwhile.
    `load` and what it calls run on another thread, since they block for minutes.

    Args:
        new_role: Function that makes what the server has because of --role.
        on_ready: Function called once, when the server is ready.
        new_metrics: Function that makes what /metrics shows.
        logs_requests: Whether requests are logged at level info, not debug.
        rules: What clients may ask for.
    """

    def __init__(
        self,
        limits: Limits,
        tokens: BearerTokens | None = None,
        new_role: NewRole = lambda readiness, registry: Role(),
        drain_timeout: float = 30.0,
        step_timeout: float = 60.0,
        on_ready: Callable[[], None] = lambda: None,
        new_metrics: NewMetrics = Metrics,
        logs_requests: bool = False,
        rules: ClientRules = ANY_CLIENT,
    ):
        self._logs_requests = logs_requests
        self.readiness = Readiness(self.on_phase)
        self.metrics = new_metrics(
            self._compiles_after_ready,
            self._is_ready,
            self._queue_seconds,
            self._background_compiles,
            self._buckets_pending,
        )
        self.role = new_role(self.readiness, self.metrics.registry)
        self.listeners = Listeners(
            self.readiness,
            limits,
            tokens or BearerTokens(),
            self.metrics.text,
            self.metrics.families,
            self.role.endpoints,
        )
        self.lifecycle = Lifecycle(
            self.readiness,
            self.listeners,
            drain_timeout,
            step_timeout,
            leaving=(lambda: self.role.exports_in_flight) if self.role.for_servers else None,
        )
        self._on_ready = on_ready
        self._loop = asyncio.get_running_loop()
        self.connector = EngineConnector(
            limits, rules, self.role, self.lifecycle.fail, self._call_soon
        )

    async def run(self, options: ServeOptions, load: Callable[[], ServingState]) -> int:
        """Listen, call `load` on another thread, serve until told to stop; return the exit code."""
        await self.listeners.start(options, self.lifecycle.drain, self.lifecycle.fail)
        self.lifecycle.watch_signals()
        try:
            return await self.lifecycle.run(load)
        except BaseException:
            await self.listeners.stop(0)
            raise
        finally:
            await self.role.close()

    # ---- events of other parts

    def on_phase(self, phase: Phase) -> None:
        """Report a new phase to health checks."""
        self.listeners.tell(phase)
        if phase is Phase.READY:
            self._on_ready()

    def on_host_lost(self, loss: PodFailure) -> None:
        """End the process, since a host of its pod is gone; from any thread."""
        self._call_soon(lambda: self.lifecycle.fail(RestartingError(loss.reason)))

    def on_eviction(self, reason: str) -> None:
        """Drain, since a host of the pod is told to end; from any thread."""
        log.info("draining: %s", reason)
        self._call_soon(self.lifecycle.drain)

    def _compiles_after_ready(self) -> int:
        state = self.readiness.state
        return state.compiles_after_ready() if state else 0

    def _background_compiles(self) -> int:
        state = self.readiness.state
        return state.background_compiles() if state else 0

    def _buckets_pending(self) -> int:
        state = self.readiness.state
        return state.buckets_pending() if state else 0

    def _is_ready(self) -> bool:
        return self.readiness.phase is Phase.READY

    def _queue_seconds(self) -> float:
        state = self.readiness.state
        return state.service.queue_seconds if state else 0.0

    def _call_soon(self, job: Callable[[], None]) -> None:
        # Other threads may outlive the loop at the end of the process.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(job)

    # ---- loading, on a thread of its own

    def load(
        self,
        loader: ModelLoader,
        exchanges_pages: bool = False,
        meshes: Meshes | None = None,
        provider: "TracerProvider | None" = None,
    ) -> ServingState:
        """Load the model, compile the steps to be ready with, and connect it to the service.

        Args:
            exchanges_pages: Whether the engine exchanges pages with other servers.
            meshes: Sizes of both meshes where prompts have a mesh of their own.
        """
        first, second = places(meshes, devices()) if meshes else (None, None)
        later: list[Callable[[], None]] = []
        prefill = self.load_prefill(loader, first, later) if first else None
        llm = loader.open(second)
        handshake = cards.handshake_of(llm) if exchanges_pages else None
        model = cards.model_card(llm, loader.model_name)
        engine = cards.engine_card(llm)
        defaults = loader.sampling_defaults(llm)
        self._introduce(loader, llm, [*cards.summary(model, engine), *defaults.lines])
        steps = loader.steps_of(llm)
        steps.compile()
        role = self.role
        if meshes and prefill:
            mesh = PrefillMesh(prefill, llm.runner)
            loader.say(f"pages    {mesh.transfer_path}")
            role = DecodeMeshRole(meshes, mesh, self.metrics.registry)
        requests = RequestLog(logging.INFO if self._logs_requests else logging.DEBUG)
        observers: list[RequestObserver] = [self.metrics, TrafficLog(), requests]
        if provider:
            observers.append(Traces(provider, model.name))
        service, thread = self.connector.connect_llm(llm, tuple(observers), role)
        later.append(lambda: steps.compile_rest(thread))
        self._call_soon(lambda: self.role.open(handshake))
        self._watch_experts(llm, thread)
        runners = [llm.runner, *([prefill.runner] if prefill else [])]
        gc.collect()
        # Modules and compiled steps stay for ever. Without this every full collection would walk
        # all of them, and hold up every stream meanwhile.
        gc.freeze()
        if platform(llm.runner.mesh) == "cpu":
            lower_compute_priority()
        return ServingState(
            service,
            thread,
            model,
            engine,
            compiles_after_ready=lambda: sum(r.compiles_after_ready for r in runners),
            background_compiles=lambda: sum(r.background_compiles for r in runners),
            buckets_pending=lambda: sum(r.buckets_pending for r in runners),
            after_ready=tuple(later),
            steps=lambda: cards.step_use(llm),
            handshake=handshake,
            prefill=prefill,
            defaults=defaults.fields,
        )

    def load_prefill(
        self, loader: ModelLoader, place: Place, later: list[Callable[[], None]]
    ) -> PrefillEngine:
        """Load the engine that computes prompts on a mesh of its own in this process.

        Args:
            later: Jobs for the time when requests are taken; one is added.
        """
        llm = loader.open(place)
        engine = cards.engine_card(llm)
        loader.say(f"prefill  {cards.mesh_text(engine)}, {cards.cache_text(engine)}")
        steps = loader.steps_of(llm)
        steps.compile()
        service, thread = self.connector.connect_llm(llm, role=Role())
        later.append(lambda: steps.compile_rest(thread))
        return PrefillEngine(service, thread, llm.runner)

    def _introduce(self, loader: ModelLoader, llm: LLM, lines: list[str]) -> None:
        for line in lines:
            loader.say(line)
        for note in llm.model.notes:
            loader.say(f"weights  {note}")
        for note in llm.token_notes:
            loader.say(f"tokens   {note}")
        for note in llm.chat_notes if not llm.model.spec.embeds else ():
            loader.say(f"chat     {note}")
        if self.role.introduction:
            loader.say(f"role     {self.role.introduction}")
        if llm.draft:
            loader.say(
                f"drafts   {loader.draft_model}: {describe_weights(weight_sizes(llm.draft.params))}"
            )

    def _watch_experts(self, llm: LLM, thread: EngineThread) -> None:
        mixture = llm.model.spec.mixture
        if mixture:
            layers = mixture.layers
            read = llm.runner.expert_load
            self._call_soon(lambda: self.metrics.watch_experts(layers, thread, read))
