"""A server without ports, which programs call in their own process."""

import asyncio
import logging
from types import TracebackType
from typing import Self

import httpx

from jaxserve.errors import RestartingError
from jaxserve.llm import LLM
from jaxserve.loading.sampling_defaults import sampling_defaults
from jaxserve.sampling_params import SamplingFields
from jaxserve.server import cards
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.app import NO_OTHERS, new_app
from jaxserve.server.http.checks import Callers
from jaxserve.server.lifecycle import HungStepError
from jaxserve.server.model_steps import ModelSteps
from jaxserve.server.process import ServerProcess
from jaxserve.server.security.auth import BearerTokens
from jaxserve.server.serving_state import ServingState

STEP_SECONDS = 600.0  # longer than in a server: of a batch no client waits
CLOSING_SECONDS = 60.0  # for the last step to end
NO_TOKENS = BearerTokens()
log = logging.getLogger(__name__)
ADDRESS = "http://localhost"  # nothing listens there; the application wants to be called by a name


class LocalServer:
    """OpenAI's API over one model, for callers on the event loop that it is made on.

    Use it with `async with`: requests are answered inside of the block. The engine runs on a thread
    of its own from then on, and nothing else may use it.

    Args:
        llm: Model that answers; it is closed by whoever made it.
        name: Name of the model in requests.
        limits: Limits on requests.
        steps: Compiler of the model's steps, which has compiled those to begin with.
        tokens: Tokens that callers must send.
        callers: Who may call from a browser, or by a name.
        step_seconds: Seconds after which a step counts as hung.

    Attributes:
        app: The ASGI application.
        failure: Error that ended the engine, and with it every request; None while it works.
        hangs: Whether the engine's thread did not end, behind the block. Nothing that it uses may
            be freed then, and the end of Python would wait for it.
    """

    def __init__(
        self,
        llm: LLM,
        name: str,
        limits: Limits,
        steps: ModelSteps,
        tokens: BearerTokens = NO_TOKENS,
        callers: Callers = NO_OTHERS,
        step_seconds: float = STEP_SECONDS,
    ):
        process = ServerProcess(limits)
        self._steps = steps
        self._step_seconds = step_seconds
        self.failure: BaseException | None = None
        self.hangs = False
        self._readiness = process.readiness
        service, self._thread = process.connector.connect_llm(
            llm, (process.metrics,), on_failure=self._fail
        )
        self._state = ServingState(
            service,
            self._thread,
            cards.model_card(llm, name),
            cards.engine_card(llm),
            compiles_after_ready=lambda: llm.runner.compiles_after_ready,
            defaults=_defaults(llm),
        )
        self.app = new_app(
            self._readiness,
            tokens,
            limits,
            process.metrics.text,
            process.metrics.families,
            callers,
        )
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.app), base_url=ADDRESS, timeout=None
        )

    @property
    def rows(self) -> int:
        """Number of choices that run at a time."""
        return self._state.engine.rows

    @property
    def load(self) -> float:
        """Choices that run or wait, as a multiple of those that can run at a time."""
        loads = self._state.service.loads
        return (loads.running + loads.waiting) / self.rows

    @property
    def queue_seconds(self) -> float:
        """Seconds that a new request would wait for its row."""
        return self._state.service.queue_seconds

    async def post(self, path: str, body: bytes) -> httpx.Response:
        """Answer a request whose body is JSON."""
        return await self._client.post(
            path, content=body, headers={"content-type": "application/json"}
        )

    def _fail(self, error: BaseException) -> None:
        if self.failure:
            return
        log.critical("the engine has failed", exc_info=error)
        self.failure = error
        self._readiness.set_failed()
        self._state.service.fail_all(RestartingError("the engine has failed"))

    async def _watch_steps(self) -> None:
        """Fail when a step does not end, as when a device has died."""
        while self._thread.stuck_for < self._step_seconds:
            await asyncio.sleep(1.0)
        self._fail(HungStepError(f"a step takes longer than {self._step_seconds:g} s"))

    async def __aenter__(self) -> Self:
        self._thread.start()
        self._readiness.set_ready(self._state)
        self._steps.compile_rest(self._thread)
        self._watching = asyncio.create_task(self._watch_steps())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watching.cancel()
        self.hangs = True  # should another Ctrl-C end the wait for the thread
        await self._client.aclose()
        self._state.service.close()
        self.hangs = not await asyncio.to_thread(self._thread.close, CLOSING_SECONDS)


def _defaults(llm: LLM) -> SamplingFields:
    """Return what requests leave open, as the model's generation_config.json has it."""
    if llm.model.spec.embeds:
        return {}
    return sampling_defaults(llm.model.generation_config).fields
