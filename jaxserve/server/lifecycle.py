"""The life of a server's process, from loading to its exit code.

    loading --(steps compiled)--> ready --(SIGTERM, SIGINT, Drain)--> draining --> exit

While it drains, clients are sent to other servers, and whatever still comes is served: no client
can know of a drain before it has heard of it. The exit code is 0, and 130 after SIGINT.

From any of these phases, a failed engine or listener, a step that hangs, or a lost host leads to
exit 70, which tells a supervisor to start the server again.
"""

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from jaxserve.errors import DrainingError, RestartingError
from jaxserve.server.core.service import Service
from jaxserve.server.readiness import Phase, Readiness
from jaxserve.server.serving_state import ServingState
from jaxserve.sigint import INTERRUPTED

FAILED = 70  # sysexits.h: an internal software error
GRACE = 1.0  # seconds for statuses to reach their clients
log = logging.getLogger(__name__)


class HungStepError(TimeoutError):
    """A step of the engine that takes longer than --step-timeout."""


class Closable(Protocol):
    """The listeners of a server, as far as its end needs them; see Listeners."""

    @property
    def in_use(self) -> bool:
        """Return whether a client may be about to send a request."""
        ...

    async def drain(self) -> None:
        """Refuse new connections, and send the clients of open ones elsewhere."""
        ...

    async def stop(self, grace: float) -> None:
        """Close everything; open calls have `grace` seconds to be read to their end."""
        ...


@dataclass
class Lifecycle:
    """Runs a server on the event loop that it is made on."""

    readiness: Readiness
    listeners: Closable
    drain_timeout: float = 30.0  # seconds
    step_timeout: float = 60.0  # seconds
    exit: Callable[[int], object] = os._exit  # ends the process at once
    # Returns the number of prompts whose pages other servers have yet to fetch with new calls, see
    # Role; None where no such calls come.
    leaving: Callable[[], int] | None = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _signalled: bool = False
    _interrupted: bool = False
    _failure: BaseException | None = None

    def drain(self) -> None:
        """Begin to end: clients are sent elsewhere, running requests may finish."""
        self.readiness.set_draining()
        self._stop.set()

    def fail(self, error: BaseException) -> None:
        """End with exit code 70, since the engine, a listener or another host is lost.

        Only the first failure counts; others often follow from it.
        """
        if self._failure is not None:
            return
        if isinstance(error, RestartingError):
            # The cause lies outside this process, as with a lost host: its message, in one line,
            # says all that is known, and a traceback would only hide it.
            log.critical("the server ends: %s", " ".join(str(error).split()))
        else:
            log.critical("the server has failed", exc_info=error)
        self._failure = error
        self.readiness.set_failed()
        self._stop.set()

    def watch_signals(self) -> None:
        """Let the first SIGTERM or SIGINT drain, and the second end the process at once.

        A drain that AdminService began is not cut by the first: the health checks of a draining
        server fail, whereupon a supervisor may send it.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        is_loading = self.readiness.phase is Phase.LOADING
        if is_loading or self._signalled or self._failure is not None:
            if number != signal.SIGINT:  # whoever pressed Ctrl-C knows
                log.warning("ended by %s", number.name)
            self.exit(self._code_at_once(is_loading, number))
        self._signalled = True
        self._interrupted = number == signal.SIGINT
        log.info("draining after %s, for %g s at most", number.name, self.drain_timeout)
        self.drain()

    def _code_at_once(self, is_loading: bool, number: signal.Signals) -> int:
        if self._failure is not None:
            return FAILED
        if is_loading and number == signal.SIGTERM:
            return 0
        return 128 + number

    async def run(self, load: Callable[[], ServingState]) -> int:
        """Load, serve until told to stop, drain; return the exit code.

        Errors of `load` pass through.
        """
        state = await self._load(load)
        for thread in state.threads:
            thread.start()
        self.readiness.set_ready(state)
        for begin in state.after_ready:
            begin()
        watching = asyncio.create_task(self._watch_steps(state))
        await self._stop.wait()
        until = time.monotonic() + self.drain_timeout
        if self._failure is None:
            await self._drain(state, until)
        if self._failure is None:
            # Clients may still be reading long answers, and some may just have sent a request.
            await self.listeners.stop(max(GRACE, until - time.monotonic()))
        watching.cancel()
        if self._failure is not None:  # before the drain, or during it
            return await self._die(state)
        for service in state.services:
            service.close()
        # On threads, since a step may take seconds, and a second signal ends them.
        closings = [asyncio.to_thread(thread.close) for thread in state.threads]
        if not all(await asyncio.gather(*closings)):
            log.error("a step of the engine did not end")
            return FAILED
        return self._code_after_drain

    @property
    def _code_after_drain(self) -> int:
        return INTERRUPTED if self._interrupted else 0

    async def _load(self, load: Callable[[], ServingState]) -> ServingState:
        """Load on a thread; end the process if it is told to stop meanwhile.

        Compilation cannot be interrupted, so that there is no other way to stop at once.
        """
        loading = asyncio.create_task(asyncio.to_thread(load))
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._stop.is_set():
            log.warning("told to end while loading")
            await self.listeners.stop(GRACE)
            self.exit(self._code_after_drain if self._failure is None else FAILED)
        return await loading

    async def _drain(self, state: ServingState, until: float) -> None:
        """Close the ports and wait for what runs, until the time is over or the engine fails."""
        service = state.service
        if leaving := self.leaving:
            # The ports stay open: other servers fetch their pages with new calls.
            await self._wait_while(lambda: service.in_flight or leaving(), until)
        await self.listeners.drain()
        await self._wait_while(lambda: service.in_flight or self.listeners.in_use, until)
        if time.monotonic() >= until and self._failure is None:
            self._end_requests(service)

    def _end_requests(self, service: Service) -> None:
        """Refuse requests from now on, and end those that run."""
        self.readiness.set_ended()
        if service.in_flight:
            log.warning("%d requests did not finish in time", service.in_flight)
        service.fail_all(
            DrainingError(f"the server ends; --drain-timeout {self.drain_timeout:g} has passed")
        )

    async def _wait_while(self, goes_on: Callable[[], object], until: float) -> None:
        while time.monotonic() < until and goes_on() and self._failure is None:
            await asyncio.sleep(min(0.05, self.drain_timeout))

    async def _die(self, state: ServingState) -> int:
        if isinstance(self._failure, HungStepError):
            # The stacks say where the step hangs; other failures bring a traceback of their own.
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        state.service.fail_all(
            RestartingError("the engine has failed; the server restarts (try again soon)")
        )
        await self.listeners.stop(GRACE)
        return FAILED

    async def _watch_steps(self, state: ServingState) -> None:
        """Fail when a step does not end, as when a device has died."""
        while True:
            await asyncio.sleep(min(1.0, self.step_timeout / 4))
            if max(thread.stuck_for for thread in state.threads) > self.step_timeout:
                problem = f"a step takes longer than --step-timeout {self.step_timeout:g} s"
                self.fail(HungStepError(problem))
