"""Connection of an engine, on its own thread, to a service on the event loop."""

from collections.abc import Callable
from functools import partial

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.engine_thread import ComputeTotals, EngineThread
from jaxserve.errors import RestartingError
from jaxserve.llm import LLM
from jaxserve.prompts import Prompts
from jaxserve.server.core.client_rules import ClientRules
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.request_observer import RequestObserver
from jaxserve.server.core.service import Service
from jaxserve.server.disaggregation.roles import Role

OnFailure = Callable[[BaseException], None]


class EngineConnector:
    """Maker of services and engine threads for the engines of one server.

    Args:
        rules: What clients may ask for.
        role: Role of engines for which no other one is given.
        on_failure: Function called on the event loop when an engine fails, unless another one is
            given for it.
        call_soon: Function that has a job called on the event loop; for any thread.
    """

    def __init__(
        self,
        limits: Limits,
        rules: ClientRules,
        role: Role,
        on_failure: OnFailure,
        call_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self._limits = limits
        self._rules = rules
        self._role = role
        self._on_failure = on_failure
        self._call_soon = call_soon

    def connect_llm(
        self,
        llm: LLM,
        observers: tuple[RequestObserver, ...] = (),
        role: Role | None = None,
        on_failure: OnFailure | None = None,
    ) -> tuple[Service, EngineThread]:
        """Make service and engine thread of a model whose steps are compiled; see `connect`."""
        runner = llm.runner

        def totals() -> ComputeTotals:
            total = runner.total
            return ComputeTotals(total.live_tokens, total.computed_tokens, str(runner.collected))

        return self.connect(
            llm.engine, llm.prompts, runner.config, observers, role, on_failure, totals
        )

    def connect(
        self,
        engine: Engine,
        prompts: Prompts,
        config: EngineConfig,
        observers: tuple[RequestObserver, ...] = (),
        role: Role | None = None,
        on_failure: OnFailure | None = None,
        totals: Callable[[], ComputeTotals] = ComputeTotals,
    ) -> tuple[Service, EngineThread]:
        """Make service and engine thread; the caller starts the thread. From any thread.

        Args:
            role: Role of the engine; None for that of the connector.
            on_failure: Function called on the event loop when the engine fails; None: that of
                the connector.
            totals: Function as in EngineThread.
        """
        role = role or self._role
        failed = on_failure or self._on_failure
        service: Service
        # Reports and failures arise on the engine's thread and are taken in on the event loop.
        thread = EngineThread(
            engine,
            lambda report: self._call_soon(lambda: service.take(report)),
            lambda error: self._call_soon(lambda: failed(error)),
            totals,
            ended=partial(RestartingError, "the engine has ended; the server restarts"),
        )
        page_fetcher = role.remote_prefill(thread, config.page_size)
        service = Service(
            prompts,
            thread,
            config.max_batch * config.lanes,
            config.step_tokens,
            self._limits,
            observers,
            page_fetcher,
            role.for_servers,
            self._rules,
            gives_way=not config.deterministic,
        )
        return service, thread
